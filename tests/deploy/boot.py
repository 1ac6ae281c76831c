"""Boots a systemd of its own, over this machine's files, none of which it changes, and runs a script in it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[2]
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

needs_boot = (
    pytest.mark.skipif(shutil.which("systemd-nspawn") is None, reason="systemd-nspawn is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can boot a container"),
)


def boot(script: str, folder: Path, timeout_s: float, arguments: str = "") -> dict[str, list[str]]:
    """Run one of this folder's scripts; returns what it said, by section ("== name"). What it writes to /opt/trial is
    in folder/trial afterwards."""
    mounted, trial = folder / "mounted", folder / "trial"
    mounted.mkdir()
    trial.mkdir()
    for each in Path(__file__).parent.glob("*.sh"):
        shutil.copy(each, trial)
    (trial / "run").write_text(f"#!/bin/sh\nexec bash /opt/trial/{script} {arguments} > /opt/trial/said\n")
    (trial / "run").chmod(0o755)
    seen = {"/opt/clone": CLONE, "/opt/venv": sys.prefix, "/opt/python": sys.base_prefix}
    options = [f"--bind={trial}:/opt/trial", *(f"--bind-ro={path}:{place}" for place, path in seen.items())]
    options += ["--boot", "systemd.run=/opt/trial/run", "systemd.run_success_action=exit"]
    options += ["systemd.run_failure_action=exit"]
    command = ["unshare", "--mount", "sh", "-c", BOOT, "sh", str(mounted), *options]
    booted = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if not (trial / "said").exists():
        pytest.skip(f"no container can be booted here: {booted.stdout[-500:]} {booted.stderr[-500:]}")
    found: dict[str, list[str]] = {}
    for part in (trial / "said").read_text().split("\n== ")[1:]:
        name, *lines = part.strip("\n").split("\n")
        found[name] = lines
    print((trial / "errors").read_text())
    return found
