"""The one shape of an error, RFC 9457, and the one place where errors become answers.

    ProblemError                 what the service refuses, in words for its user
    ├── MalformedDocument   400  not JSON or YAML at all
    ├── HostNotAllowed      400  a Host header that is not this service's
    ├── OriginNotAllowed    403  a request made by another site's page
    ├── NotFound            404
    ├── Conflict            409  not in this state of the study
    ├── BodyTooLarge        413
    ├── MediaNotSupported   415
    ├── Invalid             422  well-formed, and not acceptable
    └── Unavailable         503  a part the service stands on is missing

Errors of others (of the spec, of the ledger, of the database, of FastAPI) are translated in
`install`, and nowhere else.
"""

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import pyarrow as pa
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from service.logs import event
from service.store import StoreUnavailable, StudyUnknown
from trials.ledger import LedgerError
from trials.spec import DocumentError, Issue, SpecError
from trials.spec.issues import pointer

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"


class Fault(BaseModel):
    """One fault within a request."""

    pointer: str = Field(
        description="JSON pointer (RFC 6901) into the body; `?name` for a query parameter, `name:` for a header.",
        examples=["/space/batch_size/2"],
    )
    detail: str = Field(examples=["must be a number, not text ('16'); write it without quotes"])


class Problem(BaseModel):
    """An error, as RFC 9457 has it."""

    type: str = Field(description="Stable name of the kind of error.", examples=["urn:normstudy:problem:invalid"])
    title: str = Field(examples=["The request is not acceptable"])
    status: int = Field(examples=[422])
    detail: str = Field(examples=["/space/batch_size/2: must be a number, not text ('16'); write it without quotes"])
    instance: str = Field(description="Path of the request.", examples=["/v1/studies"])
    errors: list[Fault] = Field(description="Each fault with its place; empty where the error has no place.")


class ProblemError(Exception):
    """Refused, and why; `errors` has every fault that was found."""

    status: int = 500
    kind: str = "internal"
    title: str = "The service failed"

    def __init__(self, detail: str, errors: Sequence[Issue] = (), headers: Mapping[str, str] | None = None):
        self.detail, self.errors, self.headers = detail, tuple(errors), dict(headers or {})
        super().__init__(detail)


class MalformedDocument(ProblemError):
    status, kind, title = 400, "malformed", "The document is not well-formed"


class HostNotAllowed(ProblemError):
    status, kind, title = 400, "host-not-allowed", "The Host header is not this service's"


class OriginNotAllowed(ProblemError):
    status, kind, title = 403, "origin-not-allowed", "Requests from other sites' pages are refused"


class NotFound(ProblemError):
    status, kind, title = 404, "not-found", "There is no such thing"


class Conflict(ProblemError):
    status, kind, title = 409, "conflict", "Not possible in the study's present state"


class BodyTooLarge(ProblemError):
    status, kind, title = 413, "body-too-large", "The request body is too large"


class MediaNotSupported(ProblemError):
    status, kind, title = 415, "media-not-supported", "The media type is not supported"


class Invalid(ProblemError):
    status, kind, title = 422, "invalid", "The request is not acceptable"


class Unavailable(ProblemError):
    status, kind, title = 503, "unavailable", "A part that the service needs is missing"


class _HttpProblem(ProblemError):
    """Whatever status Starlette answers with; kind and title are the status's own words."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None):
        super().__init__(detail, headers=headers)
        self.status, self.title = status, HTTPStatus(status).phrase
        self.kind = self.title.lower().replace(" ", "-")


def problem_body(error: ProblemError, instance: str) -> dict[str, Any]:
    """The JSON of an error."""
    return {
        "type": f"urn:normstudy:problem:{error.kind}",
        "title": error.title,
        "status": error.status,
        "detail": error.detail,
        "instance": instance,
        "errors": [{"pointer": issue.pointer, "detail": issue.detail} for issue in error.errors],
    }


def problem_response(error: ProblemError, instance: str) -> JSONResponse:
    return JSONResponse(
        problem_body(error, instance), status_code=error.status, headers=error.headers, media_type=MEDIA_TYPE
    )


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route: its errors, for the OpenAPI document."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


def install(app: FastAPI) -> None:
    """Make every error that leaves the application one of the above."""

    def answer(request: Request, error: ProblemError) -> JSONResponse:
        if isinstance(error, Unavailable):
            event(log, "unavailable", level=logging.WARNING, path=request.url.path, detail=error.detail)
        return problem_response(error, request.url.path)

    @app.exception_handler(ProblemError)
    def _problem(request: Request, error: ProblemError) -> JSONResponse:
        return answer(request, error)

    @app.exception_handler(SpecError)
    def _spec(request: Request, error: SpecError) -> JSONResponse:
        return answer(request, Invalid(str(error), error.issues))

    @app.exception_handler(DocumentError)
    def _document(request: Request, error: DocumentError) -> JSONResponse:
        return answer(request, MalformedDocument(str(error), [Issue("", str(error))]))

    @app.exception_handler(StudyUnknown)
    def _unknown(request: Request, error: StudyUnknown) -> JSONResponse:
        return answer(request, NotFound(str(error)))

    @app.exception_handler(StoreUnavailable)
    def _store(request: Request, error: StoreUnavailable) -> JSONResponse:
        return answer(request, Unavailable(f"the database does not answer: {error}", headers={"Retry-After": "5"}))

    @app.exception_handler(LedgerError)
    def _ledger(request: Request, error: LedgerError) -> JSONResponse:
        return answer(request, Unavailable(f"the study's files cannot be read: {error}"))

    @app.exception_handler(pa.ArrowException)
    def _arrow(request: Request, error: pa.ArrowException) -> JSONResponse:
        return answer(request, Unavailable(f"the study's files cannot be read: {error}"))

    @app.exception_handler(OSError)
    def _files(request: Request, error: OSError) -> JSONResponse:
        return answer(request, Unavailable(f"the storage does not answer: {error}"))

    @app.exception_handler(RequestValidationError)
    def _request(request: Request, error: RequestValidationError) -> JSONResponse:
        issues = [Issue(_place(fault["loc"]), _text(fault)) for fault in error.errors()]
        return answer(request, Invalid("; ".join(f"{i.pointer}: {i.detail}" for i in issues), issues))

    @app.exception_handler(HTTPException)
    def _http(request: Request, error: HTTPException) -> JSONResponse:
        return problem_response(_from_http(request, error), request.url.path)

    @app.exception_handler(ClientDisconnect)
    def _gone(request: Request, error: ClientDisconnect) -> JSONResponse:
        return answer(request, MalformedDocument("the client hung up before its request had ended"))  # nobody reads it

    @app.exception_handler(Exception)
    def _unexpected(request: Request, error: Exception) -> JSONResponse:
        detail = f"an error of the service's own ({type(error).__name__}); its log says more"
        return problem_response(ProblemError(detail), request.url.path)


def _from_http(request: Request, error: HTTPException) -> ProblemError:
    """Starlette's own 404, 405 and the like."""
    detail, headers = error.detail, dict(error.headers or {})
    if error.status_code == 404:
        detail = f"there is nothing at {request.url.path}; /docs lists what there is"
    if error.status_code == 405:
        headers["Allow"] = allowed = ", ".join(_allowed_methods(request))
        detail = f"{request.method} is not possible at {request.url.path}; possible: {allowed}"
    return _HttpProblem(error.status_code, detail, headers=headers)


def _allowed_methods(request: Request) -> list[str]:
    """Methods of every route at the path; Starlette names those of the first alone."""
    methods: set[str] = set()
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD"):
        scope = {**request.scope, "method": method}
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes):
            methods.add(method)
    return sorted(methods)


def _place(location: Sequence[str | int]) -> str:
    where, *path = location
    if where == "query":
        return f"?{path[0] if path else ''}"
    if where == "header":
        return f"{path[0] if path else ''}:"
    return pointer(path)


def _text(fault: Mapping[str, Any]) -> str:
    message = str(fault["msg"]).removeprefix("Input ").removeprefix("Value error, ")
    value = repr(fault.get("input"))
    return f"{message}, not {value if len(value) <= 60 else value[:57] + '...'}"
