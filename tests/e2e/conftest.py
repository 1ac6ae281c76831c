"""One daemon with the real model for all tests that leave it as it was."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.daemon import Daemon, serving

# Short for a test's sake, and yet long for a client that only has to send twenty bytes.
HELLO_TIMEOUT_S = 3


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Ends by SIGTERM, with nothing in its log that it has to be ashamed of."""
    folder: Path = tmp_path_factory.mktemp("e2e")
    flags = ["--blas", "auto", "--metrics-port", "0", "--hello-timeout", str(HELLO_TIMEOUT_S)]
    # So that mutated requests, of which many lose their own limit, do not write novels.
    flags += ["--max-tokens", "8"]
    with serving(folder, *flags) as running:
        yield running
        assert running.terminate() == 0, running.log
        assert not running.socket.exists()
        assert " error " not in running.log, running.log
        assert "Traceback" not in running.log, running.log
