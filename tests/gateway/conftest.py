"""One daemon with the real model and one gateway in front of it, for all tests that leave them as they were."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.daemon import Daemon, serving
from tests.gateway.process import GatewayProcess, gateway_to


@pytest.fixture(scope="package")
def real_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder: Path = tmp_path_factory.mktemp("gateway")
    with serving(folder, "--max-tokens", "16") as running:
        yield running
        assert running.terminate() == 0, running.log
        assert "Traceback" not in running.log, running.log


@pytest.fixture(scope="package")
def gateway(real_daemon: Daemon) -> Iterator[GatewayProcess]:
    with gateway_to(real_daemon.folder, real_daemon.socket) as running:
        yield running
