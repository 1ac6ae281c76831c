"""launchd's property lists, against what launchd.plist(5) allows of each key that they have."""

import plistlib
import re
from pathlib import Path
from typing import Any

import pytest

from scheduler import configuration
from scheduler.activation import LAUNCHD_NAME
from scheduler.commands.units import KILL_AFTER_DRAIN_S, Asked, Machine, plan
from scheduler.options import OPTIONS
from scheduler.usage import Parser
from tests.deploy.folder import DEPLOY, PACKAGED

JOBS = ("agent", "daemon")
SHIPPED = (*JOBS, "gateway")
# Key: its type, and which values launchd takes. It ignores keys that it does not know, so a misspelt one is silent.
SCHEMA: dict[str, tuple[type, Any]] = {
    "Label": (str, re.compile(r"[\w.-]+")),
    "ProgramArguments": (list, None),
    "Sockets": (dict, None),
    "RunAtLoad": (bool, None),
    "KeepAlive": (dict, {"SuccessfulExit", "Crashed", "NetworkState", "PathState", "OtherJobEnabled"}),
    "ThrottleInterval": (int, range(1, 3600)),
    "ExitTimeOut": (int, range(1, 3600)),
    "ProcessType": (str, re.compile("Background|Standard|Adaptive|Interactive")),
    "Umask": (int, range(0o1000)),
    "SoftResourceLimits": (
        dict,
        {
            "Core",
            "CPU",
            "Data",
            "FileSize",
            "MemoryLock",
            "NumberOfFiles",
            "NumberOfProcesses",
            "ResidentSetSize",
            "Stack",
        },
    ),
    "StandardErrorPath": (str, re.compile("/.+")),
    "UserName": (str, re.compile(r"[\w-]+")),
    "GroupName": (str, re.compile(r"[\w-]+")),
    "WorkingDirectory": (str, re.compile("/.+")),
    "EnvironmentVariables": (dict, None),
}
SOCKET: dict[str, tuple[type, Any]] = {
    "SockPathName": (str, re.compile("/.{1,102}")),
    "SockPathMode": (int, range(0o1000)),
    "SockType": (str, re.compile("stream")),
}


def faults(found: dict[str, Any], schema: dict[str, tuple[type, Any]]) -> list[str]:
    wrong = []
    for key, value in found.items():
        if key not in schema:
            wrong.append(f"{key} is unknown")
            continue
        kind, allowed = schema[key]
        if type(value) is not kind:
            wrong.append(f"{key} is no {kind.__name__}")
        elif isinstance(allowed, re.Pattern):
            if not allowed.fullmatch(value):
                wrong.append(f"{key} is {value!r}")
        elif isinstance(allowed, set):
            wrong += [f"{key} has {name}" for name in set(value) - allowed]
        elif allowed is not None and value not in allowed:
            wrong.append(f"{key} is {value}")
    return wrong


def job(name: str) -> dict[str, Any]:
    read: dict[str, Any] = plistlib.loads((DEPLOY / "launchd" / f"{name}.plist").read_bytes())
    return read


def written(user: bool) -> dict[str, Any]:
    """What `laned install-service` makes of a template."""
    machine = Machine(("/opt/laned/bin/laned",), DEPLOY, Path("/Users/ada"), Path("/none"), is_mac=True)
    asked = Asked(("--model", "x"), socket="/Users/ada/x.sock", drain_s=300.0, writes=("/ssd",), is_public=True)
    (file,) = plan(machine, asked, user=user).files
    read: dict[str, Any] = plistlib.loads(file.text.encode())
    return read


@pytest.mark.parametrize(
    "found",
    [*map(job, SHIPPED), written(user=True), written(user=False)],
    ids=[*SHIPPED, "agent as written", "daemon as written"],
)
def test_launchd_knows_every_key_and_takes_every_value(found: dict[str, Any]) -> None:
    assert faults(found, SCHEMA) == []
    if found["Label"] == "local.laned":
        assert set(found["Sockets"]) == {LAUNCHD_NAME}, "the name that we ask for"
        assert faults(found["Sockets"][LAUNCHD_NAME], SOCKET) == []


def test_the_schema_catches_what_it_should() -> None:
    assert faults({"KeepAlives": {}, "Umask": "077", "ProcessType": "Fast", "ExitTimeOut": 0}, SCHEMA) == [
        "KeepAlives is unknown",
        "Umask is no int",
        "ProcessType is 'Fast'",
        "ExitTimeOut is 0",
    ]
    assert faults({"KeepAlive": {"SuccesfulExit": False}}, SCHEMA) == ["KeepAlive has SuccesfulExit"]


@pytest.mark.parametrize("name", JOBS)
def test_it_is_what_the_daemon_needs(name: str) -> None:
    found = job(name)
    (drain_s,) = (option.default for option in OPTIONS if option.name == "drain-timeout")
    assert found["ExitTimeOut"] == drain_s + KILL_AFTER_DRAIN_S
    assert found["KeepAlive"] == {"SuccessfulExit": False}
    assert found["Umask"] == 0o077
    program, command, *flags = found["ProgramArguments"]
    assert command == "serve"
    parser = Parser("serve", "", ())
    configuration.add_flags(parser)
    parser.parse(flags)
    mode = found["Sockets"][LAUNCHD_NAME]["SockPathMode"]
    if name == "agent":
        assert mode == 0o600
    else:
        assert program == PACKAGED
        assert mode == 0o666
        assert flags == ["--config", "/etc/laned/laned.toml"], "who may connect is the file's to say"
        assert found["GroupName"] in (DEPLOY / "service.toml").read_text()


def test_the_gateway_is_killed_when_systemd_would_do_so() -> None:
    found = job("gateway")
    assert found["ProgramArguments"][1] == "gateway"
    unit = (DEPLOY / "systemd" / "laned-gateway.service").read_text()
    assert f"TimeoutStopSec={found['ExitTimeOut']}s" in unit


@pytest.mark.parametrize("name", SHIPPED)
def test_no_path_needs_a_shell(name: str) -> None:
    assert not re.search(r"<string>[^<]*[~$]", (DEPLOY / "launchd" / f"{name}.plist").read_text())
