"""Problem documents (RFC 9457): the one form in which a service says what is wrong with a request.

The exception that carries one, and the Starlette handlers that turn it, and every other error, into a response. What
counts as a fault is decided by the services; nothing here knows an endpoint.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

MEDIA_TYPE = "application/problem+json"
"""RFC 9457, section 6.1."""

_TYPE_PREFIX = "urn:geo-assets:problem:"
_VALUE_LIMIT = 200
"""Characters of an offending value that a document repeats: enough to recognise it, too few to be a payload."""


class ProblemError(Exception):
    """A request that is answered with a problem document.

    Args:
        status: HTTP status, 4xx or 5xx.
        slug: Last word of the problem's type, such as `signature`; None is `about:blank`, where the status says it all.
        detail: One sentence for people: what is wrong and what to do.
        field: Name of the offending header, parameter or member.
        value: What it was; left out of the document when None. Never a device's coordinate.
        limit: What it may be at most, or which values are allowed.
        headers: Headers of the response, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        slug: str | None,
        detail: str,
        *,
        field: str | None = None,
        value: Any = None,
        limit: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.slug, self.detail = status, slug, detail
        self.field, self.value, self.limit = field, value, limit
        self.headers = dict(headers or {})

    def document(self) -> dict[str, Any]:
        """The document's members; those without a value are left out."""
        members: dict[str, Any] = {
            "type": "about:blank" if self.slug is None else _TYPE_PREFIX + self.slug,
            "title": _title(self.status),
            "status": self.status,
            "detail": self.detail,
            "field": self.field,
            "value": _short(self.value),
            "limit": self.limit,
        }
        return {name: member for name, member in members.items() if member is not None}


def problem_response(problem: ProblemError) -> Response:
    """The response that carries a problem's document; never cached."""
    return Response(
        msgspec.json.encode(problem.document()),
        status_code=problem.status,
        media_type=MEDIA_TYPE,
        headers={"Cache-Control": "no-store", **problem.headers},
    )


def unavailable(detail: str, retry_after_s: int) -> ProblemError:
    """503 with Retry-After: not now, and when to ask again (seconds)."""
    return ProblemError(503, "unavailable", detail, headers={"Retry-After": str(retry_after_s)})


def exception_handlers() -> dict[Any, Callable[[Request, Any], Awaitable[Response]]]:
    """Handlers for `Starlette(exception_handlers=...)`: every error of a service leaves as a problem document."""
    return {ProblemError: _problem, HTTPException: _http_exception, Exception: _unexpected}


async def _problem(_: Request, error: ProblemError) -> Response:
    return problem_response(error)


async def _http_exception(request: Request, error: HTTPException) -> Response:
    """Answers of the router itself: no such path, no such method."""
    headers = dict(error.headers or {})
    if error.status_code == 404 and error.detail == _title(404):
        detail = f"There is nothing at {request.url.path[:_VALUE_LIMIT]}."
    elif error.status_code == 405:
        detail = f"{request.method} is not possible here; allowed: {headers.get('Allow', 'nothing')}."
    else:
        detail = error.detail
    return problem_response(ProblemError(error.status_code, None, detail, headers=headers))


async def _unexpected(request: Request, error: Exception) -> Response:
    """An error of ours: the log gets its kind and where it was, the sender a document without a trace."""
    structlog.get_logger().error(
        "request failed", path=request.url.path, method=request.method, error=type(error).__name__
    )
    detail = "The service failed on this request. It is safe to send it again."
    return problem_response(ProblemError(500, None, detail))


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def _short(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _VALUE_LIMIT else text[:_VALUE_LIMIT] + "…"
