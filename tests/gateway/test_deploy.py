"""What deploy/ has for the gateway: the unit, the property list, and nginx in front of two of them."""

from __future__ import annotations

import plistlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import trio

from scheduler.gateway.command import _parser
from tests.bench.serve import free_port
from tests.deploy.folder import DEPLOY, LANED, PACKAGED
from tests.deploy.test_systemd_units import MOST_EXPOSED, analyze, needs_analyze, one
from tests.gateway.http_client import asking, call, post
from tests.gateway.in_process import CHAT, chat
from tests.gateway.process import gateway_to
from tests.scheduler import echo
from tests.scheduler.trio_test import until

UNIT = DEPLOY / "systemd" / "laned-gateway.service"
JOB = DEPLOY / "launchd" / "gateway.plist"
NGINX = shutil.which("nginx")


def test_what_is_started_is_the_gateway_with_flags_that_it_has() -> None:
    from_unit = one(UNIT, "Service", "ExecStart").replace("%d", "/credentials").split()
    with JOB.open("rb") as file:
        from_job = plistlib.load(file)["ProgramArguments"]
    for command in (from_unit, from_job):
        assert command[1] == "gateway"
        assert _parser().parse(command[2:]).port == "8080"


@needs_analyze
def test_systemd_finds_no_fault_and_little_is_exposed(tmp_path: Path) -> None:
    for name in (UNIT.name, "laned.socket", "laned.service"):
        text = (UNIT.parent / name).read_text().replace(PACKAGED, str(LANED))
        (tmp_path / name).write_text(text)
    checked = analyze("verify", f"./{UNIT.name}", cwd=tmp_path)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    measured = analyze("security", "--offline=true", f"./{UNIT.name}", cwd=tmp_path).stdout
    (level,) = re.findall(r"Overall exposure level for .*: ([\d.]+)", measured)
    assert float(level) <= MOST_EXPOSED


def configuration(folder: Path, port: int, qwen: str, llama: str) -> Path:
    """The example without TLS, in a folder of its own."""
    text = (DEPLOY / "proxy" / "nginx.conf").read_text()
    text = re.sub(r"\n *(ssl_certificate|listen \[::\]).*", "", text)
    text = text.replace("listen 443 ssl", f"listen 127.0.0.1:{port}")
    for example, url in (("127.0.0.1:8081", qwen), ("127.0.0.1:8082", llama)):
        text = text.replace(f"server {example}", f"server {url.removeprefix('http://')}")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    path = folder / "nginx.conf"
    path.write_text(
        f"daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log; events {{}}\n"
        f"http {{ access_log off; {temporary}\n{text}\n}}"
    )
    return path


@contextmanager
def proxy(folder: Path, qwen: str, llama: str) -> Iterator[str]:
    port = free_port()
    path = configuration(folder, port, qwen, llama)
    command = [str(NGINX), "-c", str(path), "-e", f"{folder}/error.log"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as nginx:
        try:
            trio.run(answering, port, nginx)
            yield f"http://127.0.0.1:{port}"
        finally:
            nginx.terminate()


async def answering(port: int, nginx: subprocess.Popen[bytes]) -> None:
    while True:
        assert nginx.poll() is None, "nginx has ended"
        with suppress(OSError):
            await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
            return
        await trio.sleep(0.02)


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_two_gateways_behind_one_address(tmp_path: Path) -> None:
    socket = tmp_path / "d.sock"

    async def ask(url: str) -> None:
        async with echo.serving(socket) as daemon:
            for name in ("qwen", "llama"):
                while (await call(url, "GET", f"/{name}/health"))[0] != 200:  # noqa: ASYNC110
                    await trio.sleep(0.05)
                status, said = await post(url, f"/{name}{CHAT}", chat("one", model=name))
                assert (status, said["choices"][0]["message"]["content"]) == (200, "one ")
                assert (await call(url, "GET", f"/{name}/"))[0] == 200
                assert (await call(url, "GET", f"/{name}/metrics"))[0] == 404
            # Tokens come through at once, and a client that goes cancels through it.
            async with asking(url, "POST", f"/llama{CHAT}", chat("one hang", stream=True)) as exchange:
                assert await exchange.head() == 200
                async for piece in exchange.pieces():
                    if b"one" in piece:
                        break
            await until(lambda: daemon.service.num_cancelled == 1)

    with (
        gateway_to(tmp_path, socket, "--served-model-name", "qwen") as qwen,
        gateway_to(tmp_path, socket, "--served-model-name", "llama") as llama,
        proxy(tmp_path, qwen.url, llama.url) as url,
    ):
        trio.run(ask, url)
