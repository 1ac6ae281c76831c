"""Who may ask, and how much at once: keys, web pages of other origins, and the size of a body."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import trio

from scheduler.gateway.asgi import Gone, Receive
from scheduler.gateway.faults import Fault

# A body of the largest size over a slow line; a client that takes longer has stopped.
BODY_S = 60.0


@dataclass(frozen=True, slots=True)
class Guard:
    """keys: any of them opens; none at all: everybody may ask. origins: web pages that may, "*" for all."""

    keys: Collection[str] = ()
    origins: Collection[str] = ()
    body_bytes: int = 8 << 20

    def check_key(self, headers: Mapping[str, str]) -> None:
        """In constant time for keys of any length, and whichever of them it is. Raises Fault."""
        if not self.keys:
            return
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        digest = _digest(given)
        if not sum([hmac.compare_digest(digest, _digest(key)) for key in self.keys]):
            told = "this is none of the gateway's API keys" if given else "an API key is missing"
            raise Fault(
                401, f"{told}: send one as `Authorization: Bearer KEY`, or as `x-api-key`", code="invalid_api_key"
            )

    def check_origin(self, headers: Mapping[str, str]) -> None:
        """A page that somebody's browser has open must not use that somebody's model. Browsers say whose page asks; our
        own page is one, by the address that it has here. A key says more than an origin. Raises Fault."""
        origin = headers.get("origin")
        if origin is None or self.keys or self.allows(origin):
            return
        at = urlsplit(origin)
        # Anybody can give our address a name of theirs, but not the other way round.
        if at.netloc != headers.get("host") or not _is_address(at.hostname or ""):
            raise Fault(
                403, f"pages of {origin} may not ask here: --allowed-origins lets them", code="origin_not_allowed"
            )

    def allows(self, origin: str) -> bool:
        return "*" in self.origins or origin in self.origins

    def check_type(self, headers: Mapping[str, str]) -> None:
        """JSON only, which no page of another origin can send without being asked back. Raises Fault."""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise Fault(415, f"the body must be application/json, not {kind or 'without a content-type'}")

    async def read_body(self, receive: Receive) -> bytes:
        """Raises Fault for one that is too large or too slow, Gone where the client is."""
        body = bytearray()
        with trio.move_on_after(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                body += message.get("body", b"")
                if len(body) > self.body_bytes:
                    raise Fault(413, f"the body is over {self.body_bytes} bytes: --max-body-bytes allows more")
                if not message.get("more_body", False):
                    return bytes(body)
        raise Fault(408, f"the body did not come within {BODY_S:g} s")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
