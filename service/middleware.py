"""What every request must pass first, as plain ASGI: whose host it names, whose page sent it, how big it is."""

from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.problems import BodyTooLarge, HostNotAllowed, OriginNotAllowed, ProblemError, problem_response
from service.settings import is_loopback


class Gatekeeper:
    """Refuses requests that come by a foreign name (DNS rebinding) or from another site's page.

    Args:
        allowed_hosts: names beside loopback's.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Iterable[str] = ()):
        self._app, self._allowed = app, {host.lower() for host in allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (problem := self._objection(Headers(scope=scope))):
            await problem_response(problem, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _objection(self, headers: Headers) -> ProblemError | None:
        host = headers.get("host", "")
        name = host_name(host)
        if not (is_loopback(name) or name in self._allowed):
            return HostNotAllowed(f"this service is not {name!r}; an operator can allow it in NORMSTUDY_ALLOWED_HOSTS")
        for origin in headers.getlist("origin"):
            if origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
                return OriginNotAllowed(f"a page of {origin!r} may not use this service")
        return None


class BodyLimit:
    """Refuses bodies beyond `limit` bytes, by their announced length or, where there is none, while they arrive."""

    def __init__(self, app: ASGIApp, limit: int):
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced[:20]) > self._limit:
            await problem_response(self._problem(), scope["path"])(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise self._problem()  # travels through the route to the application's handlers
            return message

        await self._app(scope, counted, send)

    def _problem(self) -> BodyTooLarge:
        return BodyTooLarge(f"a body may have {self._limit} bytes at most")


def host_name(host: str) -> str:
    """The name in a Host header, without its port: `[::1]:8080` → `::1`."""
    if host.startswith("["):
        return host[1:].split("]", 1)[0]
    return host.rsplit(":", 1)[0].lower() if host.count(":") == 1 else host.lower()
