"""The units under a systemd of their own: a container is booted over this machine's files, none of which it changes."""

import pytest

from tests.deploy.boot import boot, needs_boot

pytestmark = [pytest.mark.slow, *needs_boot]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Section of booted.sh: what it printed."""
    return boot("booted.sh", tmp_path_factory.mktemp("booted"), timeout_s=600)


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


def test_it_tells_of_its_process_though_it_sees_no_other(said: dict[str, list[str]]) -> None:
    assert said["metrics"] == [
        "process_cpu_seconds_total",
        "process_max_fds",
        "process_open_fds",
        "process_resident_memory_bytes",
        "process_start_time_seconds",
        "process_virtual_memory_bytes",
    ]


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
