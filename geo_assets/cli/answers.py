"""How the command line answers: consoles, one-line errors, and the settings every command starts from."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from geo_assets.settings import Settings

if TYPE_CHECKING:
    from geo_assets.stack import Stack

_WIDTH = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 400

out = Console(highlight=False, width=_WIDTH)
"""Answers. Piped into another program they are as wide as they need to be: a cut id cannot be searched for."""

err = Console(stderr=True, highlight=False)


class CliError(Exception):
    """What the user is told in one line; the command ends with `code`."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def complain(message: str) -> None:
    """One line on standard error."""
    err.print(f"[red]geo-assets:[/red] {escape(message)}", soft_wrap=True)


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    if seconds < 5_400:
        return f"{round(seconds / 60):,} min"
    return f"{seconds / 3_600:,.1f} h" if seconds < 172_800 else f"{seconds / 86_400:,.1f} d"


def escape(text: str) -> str:
    """Text of somebody else's as it is shown in a line or a table: what looks like markup is no markup."""
    from rich.markup import escape as escaped

    return escaped(text)


def settings(**changes: object) -> Settings:
    """The settings of this process, with what flags changed; flags reach child processes through the environment."""
    for name, value in changes.items():
        if value is not None:
            os.environ[f"GEO_ASSETS_{name.upper()}"] = str(value)
    current = Settings()
    return current.model_copy(update={"home": current.home.expanduser().absolute()})


def logged_settings(**changes: object) -> Settings:
    """The same, with logging set up."""
    from geo_assets import logs

    current = settings(**changes)
    logs.configure(current.log_level, current.log_format)
    return current


def open_home(**changes: object) -> Stack:
    """A stack over a home folder that exists, can be written, and is of the stack that the settings choose.

    Raises:
        CliError: It is not; one line says why.
    """
    from geo_assets.stack import Stack

    current = logged_settings(**changes)
    check_home(current)
    return Stack(current)


def check_home(current: Settings) -> None:
    """See that the home folder is there, takes a file, and is of the stack that the settings choose.

    Raises:
        CliError: It does not; one line says why and what to do.
    """
    check_writable(current)
    check_stack(current)


def check_stack(current: Settings) -> None:
    """See that the home's last `up` worked on the stack that these settings choose.

    Raises:
        CliError: It worked on another: what this process would open, nobody serves.
    """
    from geo_assets import home_stack

    known, present = home_stack.read(current.home), home_stack.places_of(current)
    names = home_stack.other(known, present) if known else []
    if known and names:
        switch = "geo-assets up --switch-stack" if home_stack.lacking(known, present) else "geo-assets up"
        raise CliError(
            f"home {current.home} works on {home_stack.told(known)}, these settings choose {home_stack.told(present)}: "
            f"source the settings that its `geo-assets up` has ({home_stack.variables(names)}), set GEO_ASSETS_HOME to "
            f"another folder, or switch this home on purpose with `{switch}`"
        )


def check_writable(current: Settings) -> None:
    """See that the home folder is there and takes a file.

    Raises:
        CliError: It does not; one line says why and what to do.
    """
    probe = current.home / f".probe-{os.getpid()}"
    try:
        current.home.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\0" * 65_536)
    except OSError as fault:
        raise CliError(
            f"home {current.home} cannot be written: {fault.strerror or fault}; "
            "set GEO_ASSETS_HOME to a folder that can"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
