"""The rules, by Prometheus's own tools, and their metrics by ours."""

import re
import shutil
import subprocess

import pytest

from tests.deploy.exposed import names_in, series
from tests.deploy.folder import DEPLOY

FOLDER = DEPLOY / "prometheus"
RULES = (FOLDER / "rules.yml").read_text()
ALERTS = re.findall(r"- alert: (\w+)", RULES)
RECORDED = set(re.findall(r"- record: (\S+)", RULES))

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool, of Prometheus, is not installed"
)


def promtool(*argv: str) -> str:
    done = subprocess.run(["promtool", *argv], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_prometheus_takes_them() -> None:
    assert "is valid prometheus config file syntax" in promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", "--lint=all", "--lint-fatal", "rules.yml")


@needs_promtool
def test_each_alert_comes_when_it_should_and_only_then() -> None:
    promtool("test", "rules", "rules_test.yml")


def test_every_alert_is_tried() -> None:
    tests = (FOLDER / "rules_test.yml").read_text()
    assert len(ALERTS) == len(set(ALERTS)) > 10
    assert set(re.findall(r'alertname="(\w+)"', tests)) == set(ALERTS)
    assert set(re.findall(r"laned:\w+:\w+", tests)) <= RECORDED


def test_every_metric_is_one_of_ours() -> None:
    named = names_in(RULES)
    assert len(named) > 15
    assert named - series() == set()


def test_each_alert_has_its_lines_in_the_runbook() -> None:
    runbook = (DEPLOY / "README.md").read_text()
    headings = re.findall(r"^### (\w+)\n\n(.+)", runbook, re.MULTILINE)
    assert [name for name, _ in headings] == ALERTS
    assert re.findall(r"runbook_url: \"deploy/README.md#(\w+)\"", RULES) == [name.lower() for name in ALERTS]
    for _, first in headings:
        assert len(first) > 40, "a line that says what to do"
