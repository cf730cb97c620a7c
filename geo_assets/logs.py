"""One way to log: structured events, readable lines on a terminal, JSON elsewhere when asked for."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


class _Stderr:
    """Standard error as it is when a line is written: whoever redirects it later is followed."""

    def write(self, text: str) -> int:
        """Write through."""
        return sys.stderr.write(text)

    def flush(self) -> None:
        """Flush through."""
        sys.stderr.flush()

    def isatty(self) -> bool:
        """Whether it is a terminal now."""
        return sys.stderr.isatty()


def tells_debug(log: Any) -> bool:
    """Whether a structlog logger's debug lines are written: what only they tell need not be found out else."""
    return log.is_enabled_for(logging.DEBUG)


def configure(level: str = "info", log_format: str = "auto", *, stream: object | None = None) -> None:
    """Set up structlog and the standard library's logging for this process.

    Args:
        level: debug, info, warning or error.
        log_format: `console`, `json`, or `auto` (console).
        stream: Where lines go; standard error by default, so that a command's answer stays alone on standard output.
    """
    target = stream or _Stderr()
    configure_events(level, log_format, stream=target)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=target, force=True)  # pyright: ignore[reportCallIssue, reportArgumentType]
    # A server that is away is told once by the port in front of the pool; the pool itself warns of every attempt.
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)


def configure_events(
    level: str = "info", log_format: str = "auto", *, stream: object | None = None, cache: bool = True
) -> None:
    """Set up structlog alone, for processes whose other logging is somebody else's: Dagster's.

    Its own default shows the variables of each frame of a traceback, passwords among them. Here none is shown.

    Args:
        level: As of `configure`.
        log_format: The same.
        stream: The same.
        cache: Whether loggers keep this for good.
    """
    number = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
    target = stream or _Stderr()
    shared = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if log_format == "json" else "%H:%M:%S", utc=log_format == "json"),
    ]
    if log_format == "json":
        renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(
            colors=bool(getattr(target, "isatty", lambda: False)()),
            exception_formatter=structlog.dev.plain_traceback,
            pad_event_to=30,
        )
    structlog.configure(
        processors=[*shared, structlog.processors.StackInfoRenderer(), structlog.processors.format_exc_info, renderer]
        if log_format == "json"
        else [*shared, structlog.processors.StackInfoRenderer(), renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(target),  # pyright: ignore[reportArgumentType]
        cache_logger_on_first_use=cache,
    )
