"""Versions that are installed against those that are asked for."""

from importlib.metadata import PackageNotFoundError

import pytest

from scheduler.commands import packages
from scheduler.commands.packages import check_packages, satisfies


@pytest.mark.parametrize(
    ("found", "bounds", "holds"),
    [
        ("0.32.4", ">=0.32.4,<0.33", True),
        ("0.33", ">=0.32.4,<0.33", False),
        ("0.33.0", "<0.33", False),
        ("0.32.3", ">=0.32.4", False),
        ("0.32.10", ">=0.32.4", True),
        ("1.2", "==1.2.0", True),
        ("1.2.1", "!=1.2.1", False),
        ("0.32.4.dev20260101+abc", ">=0.32.4", True),
        ("2.0rc1", ">=2", True),
        ("5", "", True),
    ],
)
def test_bounds(found: str, bounds: str, holds: bool) -> None:
    assert satisfies(found, bounds) is holds


def version_of(name: str) -> str:
    if name not in VERSIONS:
        raise PackageNotFoundError(name)
    return VERSIONS[name]


VERSIONS = {"mlx": "0.31.2", "trio": "0.35.0"}


def test_what_is_missing_or_too_old_is_a_problem() -> None:
    needed = ["mlx>=0.32.4,<0.33", "trio>=0.30", "rich>=14", 'mlx[cpu] ; sys_platform == "linux" and extra == "cpu"']
    finding = packages._requirements(needed, version_of)
    assert finding.level == "problem"
    assert finding.said == "mlx is 0.31.2, laned asks for >=0.32.4,<0.33; rich is not installed"
    assert finding.do is not None
    assert packages._requirements(["trio>=0.30"], version_of).level == "ok"


def test_two_parts_of_mlx_exclude_each_other() -> None:
    assert list(packages._backends(["mlx-cpu", "MLX_CPU", "mlx", "mlx-lm"])) == []
    (finding,) = packages._backends(["mlx_cpu", "mlx-cuda-13"])
    assert finding.level == "problem"
    assert "mlx-cpu and mlx-cuda-13" in finding.said
    assert "pip uninstall mlx-cpu mlx-cuda-13" in str(finding.do)


def test_this_installation_is_in_order() -> None:
    assert [finding.level for finding in check_packages()] == ["ok"]
