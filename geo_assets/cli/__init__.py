"""The command line: `geo-assets`. One file a family of commands; each imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from geo_assets.cli import (
    backfill,
    backup,
    canary,
    data,
    doctor,
    letters,
    maintenance,
    migrate,
    partitions,
    routing,
    schemas,
    serve,
    simulate,
    status,
    tile,
    tileset,
    up,
)
from geo_assets.cli.answers import CliError, complain

app = typer.Typer(
    name="geo-assets",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="A live map platform on Dagster: signed spatial edits in, exactly the touched tiles out.\n\n"
    "Start with [bold]geo-assets up --sample[/bold]: a real city on a map, its tiles in Dagster's asset catalog. "
    "Settings come from the environment (GEO_ASSETS_HOME, GEO_ASSETS_EDGE_PORT, …) or from --home.",
)


@app.callback()
def _settings(
    home: str = typer.Option(
        None, "--home", help="Folder of all embedded data (env GEO_ASSETS_HOME, default .geo_assets)."
    ),
    log_level: str = typer.Option(
        None, "--log-level", help="debug, info, warning or error (env GEO_ASSETS_LOG_LEVEL)."
    ),
) -> None:
    if home:
        os.environ["GEO_ASSETS_HOME"] = home
    if log_level:
        os.environ["GEO_ASSETS_LOG_LEVEL"] = log_level


for family in (
    up,
    simulate,
    serve,
    routing,
    data,
    backfill,
    status,
    letters,
    tile,
    tileset,
    doctor,
    canary,
    schemas,
    maintenance,
    migrate,
    partitions,
    backup,
):
    family.register(app)


def main() -> None:
    """Run the command line: whatever goes wrong is one line on standard error and an exit code other than zero."""
    try:
        app()  # Usage errors, --help and Ctrl-C at a question are typer's own: it prints and exits.
        code = 0
    except CliError as fault:
        complain(str(fault))
        code = fault.code
    except KeyboardInterrupt:
        complain("stopped")
        code = 130
    except BrokenPipeError:
        # `geo-assets … | head` closed our output: nobody is left to read a complaint.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as fault:
        if os.environ.get("GEO_ASSETS_DEBUG"):
            raise
        complain(explain(fault))
        code = 1
    sys.exit(code)


EXPECTED = {
    "AlreadyRunning",
    "BackupError",
    "ConfigurationError",
    "FeatureStoreError",
    "GuardUnavailable",
    "LayerError",
    "LedgerError",
    "LibrariesDiffer",
    "ListenError",
    "LogError",
    "NotReady",
    "ProbeFailed",
    "PurgeMisconfigured",
    "ReadingError",
    "SchemaError",
    "StackFileError",
    "TileError",
    "TileStoreError",
}
"""Names of errors whose message is written for people. By name: importing them all would make each start slower."""


def explain(fault: Exception) -> str:
    """One line for people about an exception: expected ones say what they are, others name themselves."""
    kinds = {kind.__name__ for kind in type(fault).__mro__}
    if kinds & EXPECTED:
        return " ".join(str(fault).split())
    if isinstance(fault, OSError):
        return f"{fault.filename or 'the system'}: {fault.strerror or fault}"
    if "ValidationError" in kinds and hasattr(fault, "errors"):
        problems = fault.errors()  # pyright: ignore[reportAttributeAccessIssue]
        return "; ".join(map(_problem, problems[:3]))
    return f"unexpected {type(fault).__name__}: {' '.join(str(fault).split())[:300]} (GEO_ASSETS_DEBUG=1 shows where)"


def _problem(problem: dict[str, Any]) -> str:
    """One setting's problem; the input is not shown where it is all settings at once, which have secrets in them."""
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    return f"{_setting(problem['loc'])}: {message}, got {str(problem.get('input'))[:60]!r}"


def _setting(location: tuple[object, ...]) -> str:
    return "GEO_ASSETS_" + ".".join(map(str, location)).upper()
