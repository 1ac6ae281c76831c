"""The units under a systemd of their own: a container is booted over this machine's files, none of which it changes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("systemd-nspawn") is None, reason="systemd-nspawn is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can boot a container"),
]

CLONE = Path(__file__).parents[2]
BOOT_S = 600
# The mounts go with their namespace, whatever happens.
BOOT = """
set -e
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
shift_to="$1/root"
shift
exec systemd-nspawn --quiet --directory="$shift_to" --register=no --keep-unit --link-journal=no --console=pipe "$@"
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Section of booted.sh: what it printed."""
    mounted, trial = tmp_path_factory.mktemp("mounted"), tmp_path_factory.mktemp("trial")
    shutil.copy(CLONE / "tests" / "deploy" / "booted.sh", trial)
    (trial / "run").write_text("#!/bin/sh\nexec bash /opt/trial/booted.sh > /opt/trial/said\n")
    (trial / "run").chmod(0o755)
    seen = {"/opt/clone": CLONE, "/opt/venv": sys.prefix, "/opt/python": sys.base_prefix}
    options = [f"--bind={trial}:/opt/trial", *(f"--bind-ro={path}:{place}" for place, path in seen.items())]
    options += ["--boot", "systemd.run=/opt/trial/run", "systemd.run_success_action=exit"]
    options += ["systemd.run_failure_action=exit"]
    command = ["unshare", "--mount", "sh", "-c", BOOT, "sh", str(mounted), *options]
    booted = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=BOOT_S, check=False
    )
    if not (trial / "said").exists():
        pytest.skip(f"no container can be booted here: {booted.stdout[-500:]} {booted.stderr[-500:]}")
    found: dict[str, list[str]] = {}
    for part in (trial / "said").read_text().split("\n== ")[1:]:
        name, *lines = part.strip("\n").split("\n")
        found[name] = lines
    print((trial / "errors").read_text())
    return found


def test_the_socket_is_its_groups(said: dict[str, list[str]]) -> None:
    assert said["socket"] == ["srw-rw---- laned laned"]
    assert "Paris" in said["friend"][0], "who asked before the model was loaded"
    assert "Permission denied" in said["stranger"][0]
    assert said["state"] == ["active", "Serving SmolLM2-135M-Instruct on /run/laned/laned.sock"]


def test_it_runs_with_nothing_that_it_does_not_need(said: dict[str, list[str]]) -> None:
    process = dict(line.split(":\t") for line in said["process"])
    assert process == {"NoNewPrivs": "1", "Seccomp": "2", "CapEff": "0" * 16, "CapBnd": "0" * 16}
    folders = {"/".join(path.split("/")[:5]) for path in said["written"]}
    assert folders == {"/var/cache/laned/laned", "/var/lib/laned/store"}, said["written"]


def test_it_reloads(said: dict[str, list[str]]) -> None:
    assert said["reload"] == ["active"]
    assert "SIGHUP: --max-tokens is 5 now, and was 512" in said["journal"]


def test_a_hang_is_ended_with_its_stacks_and_the_next_one_serves(said: dict[str, list[str]]) -> None:
    restarts, answer = said["watchdog"]
    assert restarts == "1"
    assert "Paris" in answer
    journal = "\n".join(said["journal"])
    assert "Watchdog timeout (limit 10s)!" in journal
    assert "Fatal Python error: Aborted" in journal
    assert "lanes/thread.py" in journal
    assert said["stop"] == ["success"], "and the socket is gone"


def test_instances_share_a_store_that_is_started_when_one_asks(said: dict[str, list[str]]) -> None:
    answer, *rest = said["instance"]
    assert "Paris" in answer
    assert rest == ["active", "active", "success", "success"]
    assert "keeping /var/lib/laned/store for the daemons that connect to /run/laned/store.sock" in said["journal"]
