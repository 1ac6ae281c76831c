"""The gateway from its start to its end: sockets, the watch over the daemon, Hypercorn; a signal drains it."""

from __future__ import annotations

import ipaddress
import logging
import signal
import socket
import sys
from functools import partial
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.trio import serve

from scheduler.gateway.app import Gateway
from scheduler.gateway.daemon import Daemon
from scheduler.gateway.settings import Settings
from scheduler.usage import UsageError

logger = logging.getLogger(__name__)

# Hypercorn waits for as long as a client that reads nothing takes; the kernel is told not to.
STALLED_S = 30
BACKLOG = 256


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises UsageError, in a group, where the address cannot be had."""
    trio.run(_run, settings)


async def _run(settings: Settings) -> None:
    async with trio.open_nursery() as nursery:
        stop = trio.Event()
        nursery.start_soon(_stop_by_signal, stop)
        await serve_http(settings, stop)
        nursery.cancel_scope.cancel()


async def serve_http(
    settings: Settings, stop: trio.Event, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve until stop is set, and then what runs, for a while. Started with the addresses, as URLs."""
    daemon = Daemon(settings.socket)
    sockets = _bind(settings.host, settings.port)
    urls = [_url(sock) for sock in sockets]
    is_local = all(_is_loopback(sock) for sock in sockets)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(daemon.watch)
        async with trio.open_nursery() as serving:
            app: Any = Gateway(settings, daemon)
            config = _config(settings, sockets)
            await serving.start(partial(serve, app, config, shutdown_trigger=stop.wait, mode="asgi"))
            logger.info("the gateway is at %s", " and ".join(urls))
            if not settings.guard.keys and not is_local:
                logger.warning("anybody who reaches this address may ask: --api-key-file asks them for a key")
            task_status.started(urls)
        nursery.cancel_scope.cancel()


def _config(settings: Settings, sockets: list[socket.socket]) -> Config:
    config = Config()
    config.bind = [f"fd://{sock.detach()}" for sock in sockets]
    config.backlog = BACKLOG
    config.errorlog = logging.getLogger("hypercorn.error")
    config.graceful_timeout = settings.drain_s
    config.include_server_header = False
    config.keep_alive_timeout = 75
    return config


async def _stop_by_signal(stop: trio.Event) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
        async for number in received:
            logger.info("%s: draining", signal.Signals(number).name)
            stop.set()


def _bind(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of the host. Raises UsageError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return [_listening(family, address) for family, _, _, _, address in found]
    except OSError as error:
        raise UsageError(f"--host {host}, --port {port}: {error.strerror or error}.") from error


def _listening(family: int, address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_S * 1000)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_loopback(sock: socket.socket) -> bool:
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback
