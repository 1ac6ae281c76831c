"""Grafana's dashboard: what it draws exists, its expressions are Prometheus's, its panels lie side by side."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.exposed import names_in, series
from tests.deploy.folder import DEPLOY

BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
WIDTH = 24


def targets() -> Iterator[tuple[str, dict[str, Any]]]:
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target


def plain(expression: str) -> str:
    """An expression as Grafana sends it, with its variables filled in."""
    filled = expression.replace("$__rate_interval", "1m").replace("$__interval", "1m").replace("$instance", ".*")
    assert "$" not in filled, expression
    return filled


def expressions() -> list[str]:
    return [plain(target["expr"]) for _, target in targets()]


def test_every_metric_exists() -> None:
    named = names_in("\n".join(expressions()))
    assert len(named) > 40
    assert named - series() == set()


def family(name: str) -> str:
    return re.sub("_(bucket|sum|count)$", "", name)


def test_whatever_we_measure_is_drawn() -> None:
    drawn = set(map(family, names_in("\n".join(expressions()))))
    ours = {family(name) for name in series() if name.startswith("laned_")}
    # It is whether, and this page can only be seen when.
    assert ours - drawn == {"laned_model_loaded"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Prometheus, is not installed")
def test_prometheus_takes_every_expression(tmp_path: Path) -> None:
    rules = [{"record": f"panel:expression:{place}", "expr": expr} for place, expr in enumerate(expressions())]
    (tmp_path / "rules.json").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    checked = subprocess.run(
        ["promtool", "check", "rules", "rules.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(rules)} rules found" in checked.stdout


@pytest.mark.parametrize("expression", expressions())
def test_no_folder_that_daemons_share_is_summed_over_them(expression: str) -> None:
    """What each of them says of it is the same."""
    of_the_folder = re.search(
        r'laned_store_(?:(?:bytes|segments|evicted_total)\{tier="disk"|(?:foreign_bytes|corrupt_total|errors_total)\{)',
        expression,
    )
    assert of_the_folder is None or expression.startswith("sum by (instance)"), expression
    whole = re.search(r"laned_store_(?:bytes|segments|evicted_total)\{(?!tier=)", expression)
    assert whole is None, f"{expression}: of which tier?"


def test_panels_lie_side_by_side() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= WIDTH, panel["title"]
        for place in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            assert place not in taken, f"{panel['title']} lies on {taken[place]}"
            taken[place] = panel["title"]
    height = 1 + max(y for _, y in taken)
    assert len(taken) == WIDTH * height, "no gaps"


def test_it_can_be_imported_anywhere() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    assert "id" not in BOARD, "Grafana gives it one"
    variables = {variable["name"] for variable in BOARD["templating"]["list"]}
    assert variables == {"datasource", "instance"}
    source = {"type": "prometheus", "uid": "${datasource}"}
    for title, target in targets():
        assert target["datasource"] == source, title
        assert re.fullmatch("[A-Z]", target["refId"]), title
        assert "$instance" in target["expr"], title
    for panel in PANELS:
        assert panel["datasource"] == source, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]), panel["title"]


def test_units_are_grafanas() -> None:
    units = {panel["fieldConfig"]["defaults"].get("unit") for panel in PANELS}
    assert units - {None} <= {"ops", "reqps", "s", "bytes", "Bps", "none", "percentunit"}
