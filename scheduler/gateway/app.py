"""The routes, and what goes around every request: keys, origins, a number, metrics, errors in the right shape."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from scheduler.client import ClientError
from scheduler.gateway import chat, completions, messages, models, openapi, relay, responses
from scheduler.gateway.asgi import Exchange, Gone, Receive, Scope, Send
from scheduler.gateway.daemon import Daemon
from scheduler.gateway.dialect import Body, Order, new_id, now_unix_s, read
from scheduler.gateway.faults import AWAY_RETRY_S, Fault, anthropic_error, of_client_error, openai_error
from scheduler.gateway.metrics import Metrics
from scheduler.gateway.page import page
from scheduler.gateway.settings import Settings

logger = logging.getLogger(__name__)

# Nothing of anybody's is there.
OPEN_PATHS = frozenset({"/", "/health", "/openapi.json"})
# nginx's number for a client that has closed its request: it goes into the metrics, and to nobody.
CLIENT_GONE = 499


@dataclass(frozen=True, slots=True)
class Dialect:
    """A route that takes a body of this kind. order: what it asks for, under the name of a model."""

    path: str
    body: type[Body]
    order: Callable[[Any, str], Order]


DIALECTS = (
    Dialect("/v1/chat/completions", chat.ChatBody, chat.order),
    Dialect("/v1/completions", completions.CompletionBody, completions.order),
    Dialect("/v1/responses", responses.ResponsesBody, responses.order),
    Dialect("/v1/messages", messages.MessagesBody, messages.order),
)


class Gateway:
    """The ASGI app."""

    def __init__(self, settings: Settings, daemon: Daemon) -> None:
        self._settings = settings
        self._guard = settings.guard
        self._daemon = daemon
        self._metrics = Metrics(lambda: daemon.away is None)
        self._began_unix_s = now_unix_s()
        asked = [Route(each.path, _Ask(settings, daemon, each), methods=["POST"]) for each in DIALECTS]
        told = [
            Route("/", self._page),
            Route("/health", self._health),
            Route("/metrics", self._scrape),
            Route("/openapi.json", self._openapi),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
        ]
        # Starlette would answer what goes wrong itself.
        handlers: Any = {HTTPException: _raise, Exception: _raise}
        self._inner: ASGIApp = Starlette(routes=[*asked, *told], exception_handlers=handlers)
        if self._guard.origins:
            origins = sorted(self._guard.origins)
            self._inner = CORSMiddleware(
                self._inner, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"]
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            await self._inner(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_s = time.perf_counter()
        scope["request_id"] = new_id("req_")
        number = scope["request_id"].encode()
        exchange = Exchange(receive, send, [(b"x-request-id", number), (b"request-id", number)])
        self._metrics.began()
        try:
            await self._answer(scope, exchange)
        except Gone:
            if not exchange.has_ended:
                logger.debug("request %s: its client went away", scope["request_id"])
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.ended(route, exchange.status or CLIENT_GONE, time.perf_counter() - began_s)

    async def _answer(self, scope: Scope, exchange: Exchange) -> None:
        headers = Headers(scope=scope)
        try:
            self._guard.check_origin(headers)
            if scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
                self._guard.check_key(headers)
            await self._inner(scope, exchange.receive, exchange.send)
        except Gone:
            raise
        except (Fault, ClientError, HTTPException) as error:
            await _tell(scope, exchange, _fault(error))
        except Exception:
            logger.exception("request %s to %s has failed", scope["request_id"], scope["path"])
            if exchange.status is not None:
                raise
            fault = Fault(500, f"a fault of the gateway, which its log explains under {scope['request_id']}")
            await _tell(scope, exchange, fault)

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(page(), headers={"cache-control": "no-cache", "content-security-policy": _PAGE_POLICY})

    async def _health(self, request: Request) -> Response:
        daemon = self._daemon
        if daemon.away is None:
            return JSONResponse({"status": "ok", "model": daemon.model})
        retry = {"retry-after": str(int(AWAY_RETRY_S))}
        return JSONResponse({"status": "unavailable", "reason": daemon.away}, 503, headers=retry)

    async def _scrape(self, request: Request) -> Response:
        body, content_type = self._metrics.scrape(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(openapi.document(DIALECTS, has_keys=bool(self._guard.keys)))

    async def _models(self, request: Request) -> Response:
        return JSONResponse(await self._listed())

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        found = next((model for model in (await self._listed())["data"] if model["id"] == name), None)
        if found is None:
            raise Fault(404, f"there is no model {name!r} here", code="model_not_found", param="model")
        return JSONResponse(found)

    async def _listed(self) -> dict[str, Any]:
        async with self._daemon.connect() as client:
            return models.listed(self._settings, client.hello.model, self._began_unix_s)


class _Ask:
    """Answers requests in one of the dialects: reads the body, asks the daemon, and tells."""

    def __init__(self, settings: Settings, daemon: Daemon, dialect: Dialect) -> None:
        self._settings = settings
        self._daemon = daemon
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        self._settings.guard.check_type(headers)
        body = read(self._dialect.body, await self._settings.guard.read_body(receive))
        order = self._dialect.order(body, body.model or self._daemon.model or models.DEFAULT)
        await relay.unless_gone(receive, partial(self._tell, body.model, order, scope, receive, send))

    async def _tell(self, wanted: str | None, order: Order, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._daemon.connect() as client:
            adapter = models.adapter_of(wanted, self._settings, client.hello.model)
            if adapter is not None:
                order = replace(order, submits=[{**submit, "adapter": adapter} for submit in order.submits])
            if not order.is_stream:
                response = JSONResponse(await relay.whole(client, order))
                await response(scope, receive, send)
                return
            error = await relay.stream(client, order, send, self._settings.keep_alive_s)
            if error is not None:
                logger.warning("request %s broke off: %s", scope["request_id"], error)


# The page brings all that it needs along, and talks to where it came from.
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)


async def _raise(request: Request, error: Exception) -> Response:
    raise error


def _fault(error: Fault | ClientError | HTTPException) -> Fault:
    if isinstance(error, Fault):
        return error
    if isinstance(error, ClientError):
        return of_client_error(error)
    said = {404: "there is nothing at this path", 405: "this path takes another method"}
    return Fault(error.status_code, said.get(error.status_code, error.detail), headers=error.headers)


async def _tell(scope: Scope, exchange: Exchange, fault: Fault) -> None:
    """An error in the shape of the API that was asked."""
    is_anthropic = scope["path"].startswith("/v1/messages") or "anthropic-version" in Headers(scope=scope)
    body = {**anthropic_error(fault), "request_id": scope["request_id"]} if is_anthropic else openai_error(fault)
    logger.log(
        logging.WARNING if fault.status >= 500 else logging.INFO,
        "request %s to %s: %d: %s",
        *(scope["request_id"], scope["path"], fault.status, fault.message),
    )
    await JSONResponse(body, fault.status, headers=fault.headers)(scope, exchange.receive, exchange.send)
