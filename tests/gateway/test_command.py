"""The flags of `laned gateway`."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.gateway.command import KEY_VARIABLE, _parser, settings_of
from scheduler.gateway.settings import Settings
from scheduler.usage import UsageError
from tests.e2e.daemon import LANED, run


def settings(*argv: str, **environment: str) -> Settings:
    return settings_of(_parser().parse(argv), environment)


def test_nothing_said_is_the_settings_defaults() -> None:
    assert settings() == Settings(guard=settings().guard)
    assert (settings().host, settings().guard.keys, settings().guard.origins) == ("127.0.0.1", (), frozenset())


def test_what_is_said() -> None:
    said = settings(
        *("--host", "::1", "--port", "80", "--socket", "/s", "--served-model-name", "a", "b", "--any-model"),
        *("--max-body-bytes", "1MiB", "--keep-alive", "2.5", "--drain-timeout", "0"),
    )
    assert (said.host, said.port, said.socket, said.names, said.any_model) == ("::1", 80, "/s", ("a", "b"), True)
    assert (said.guard.body_bytes, said.keep_alive_s, said.drain_s) == (1 << 20, 2.5, 0.0)


def test_keys_come_from_three_places(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n# a comment\n two # of bob\n")
    keys = settings("--api-key", "a", "b", "--api-key-file", str(file), **{KEY_VARIABLE: "c"}).guard.keys
    assert set(keys) == {"a", "b", "c", "one", "two"}


@pytest.mark.parametrize("given", [("https://a", "https://b"), ('["https://a", "https://b"]',)])
def test_origins_as_words_or_as_json(given: tuple[str, ...]) -> None:
    assert settings("--allowed-origins", *given).guard.origins == {"https://a", "https://b"}


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["--port", "x"], "--port takes a whole number"),
        (["--port", "70000"], "--port"),
        (["--max-body-bytes", "many"], "--max-body-bytes takes a size"),
        (["--keep-alive", "0"], "--keep-alive"),
        (["--allowed-origins", "[1"], "--allowed-origins"),
        (["--api-key-file", "/nowhere"], "Cannot read"),
        (["--api-key-file", "/dev/null"], "holds no key"),
        (["--prt", "1"], "did you mean --port?"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(argv: list[str], hint: str) -> None:
    with pytest.raises(UsageError, match=r"^[^\n]+$") as raised:
        settings(*argv)
    assert hint in str(raised.value)


def test_an_address_that_cannot_be_had(tmp_path: Path) -> None:
    ran = run(LANED, "gateway", "--host", "192.0.2.1", "--port", "1", runtime=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("laned: --host 192.0.2.1, --port 1: ")
