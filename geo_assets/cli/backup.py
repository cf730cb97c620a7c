"""`geo-assets backup`, `restore` and `restored`: features and ledger to a file and back."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from geo_assets.cli.answers import CliError, check_stack, logged_settings, out

if TYPE_CHECKING:
    from geo_assets.services.backup import Backup, Restored
    from geo_assets.settings import Settings


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (backup, restore, restored):
        app.command(rich_help_panel="Run")(command)


def backup(file: Path = typer.Argument(..., help="A new file; it holds every feature, so keep it as such.")) -> None:
    """Write features and ledger, and how far edits were ingested, to one file. Services may go on.

    Tiles and Dagster's catalog are not in it: they follow from the features. layers.yaml and sources.yaml are your own
    files, with secrets in them: keep them apart.
    """
    from geo_assets.services.backup import make_backup

    made = make_backup(_settings(), file)
    size = file.stat().st_size
    out.print(f"{file}: {size / 1e6:,.1f} MB, {', '.join(part.component for part in made.parts)}", soft_wrap=True)


def restore(
    file: Path = typer.Argument(..., help="A file that `geo-assets backup` wrote."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask."),
) -> None:
    """Put a backup in the place of what is there. Stop everything first, and start it again afterwards.

    Edits that came after the backup are ingested again from the log; every tile is looked at again; clients reload.
    """
    from geo_assets.services.backup import read_contents
    from geo_assets.services.backup import restore as put_back

    current = _settings()
    found = read_contents(file)
    made_at = datetime.fromtimestamp(found.made_at_ms / 1000, UTC)
    if not yes:
        if not sys.stdin.isatty():
            raise CliError("it replaces every feature and the ledger: say --yes")
        typer.confirm(f"Replace features and ledger by what they were at {made_at:%Y-%m-%d %H:%M} UTC?", abort=True)
    _tell(put_back(current, file), found)


def restored(
    file: Path = typer.Argument(None, help="The backup, for its position in the log; without it, all is read again."),
) -> None:
    """After feature store and ledger were restored by other means: mark every tile, rewind the log, reload clients.

    `geo-assets restore` does it by itself. Bears being done again. Stop everything first.
    """
    from geo_assets.services.backup import after_restore, read_contents
    from geo_assets.services.migrating import migrate_all
    from geo_assets.stack import Stack

    current = _settings()
    found = read_contents(file) if file is not None else None
    migrate_all(current)
    with Stack(current) as stack:
        _tell(after_restore(stack, found), found)


def _settings() -> Settings:
    """The settings of this process, of the stack that the home works on."""
    current = logged_settings()
    check_stack(current)
    return current


def _tell(done: Restored, backup: Backup | None) -> None:
    out.print(
        f"{done.tiles:,} tiles marked ({done.cleared:,} of them without their object), "
        f"{done.replayed:,} records of the log to ingest again"
    )
    if done.unpurged:
        out.print(f"{done.unpurged:,} tiles may stay in a cache for an hour: it did not take their purge")
    if done.routing_anew:
        out.print("the routing run's snapshot is gone: it begins anew, with nobody in any fence at first")
    gone: list[str] = []
    if done.lost:
        gone.append(f"{done.lost:,} records after the backup are past the log's retention: send those edits again")
    if done.other_topic is not None and backup is not None:
        made_at = datetime.fromtimestamp(backup.made_at_ms / 1000, UTC)
        gone.append(
            f"[raw] is another topic than the backup's, of which {done.other_topic:,} records are in the backup; how "
            "many it accepted after those cannot be told, and they are gone unless they are in the new one: send every "
            f"edit since {made_at:%Y-%m-%d %H:%M} UTC again (what arrived already changes nothing)"
        )
    if gone:
        raise CliError("; ".join(gone))
