"""`geo-assets dead-letters`: list, show and replay records that could not be processed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from geo_assets.cli.answers import CliError, open_home, out

if TYPE_CHECKING:
    from geo_assets.services.dead_letters import Listed
    from geo_assets.stack import Stack

family = typer.Typer(
    no_args_is_help=True, help="Records that could not be processed: list them, look at one, replay after a fix."
)


def register(app: typer.Typer) -> None:
    """Add the family."""
    app.add_typer(family, name="dead-letters", rich_help_panel="Look")


@family.command(name="list")
def list_letters(
    reason: str = typer.Option(None, help="Only those of this reason, such as invalid_geometry."),
    source: str = typer.Option(None, help="Only those of this source."),
    every: bool = typer.Option(False, "--all", help="Also those that were replayed."),
    limit: int = typer.Option(50, min=1, help="Most rows."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON lines for programs."),
) -> None:
    """List dead letters, newest last."""
    from geo_assets.services.status import moment

    with open_home() as stack:
        rows = _select(stack, reason, source, every)
    if as_json:
        for one in rows[-limit:]:
            out.print(
                json.dumps({**one.letter.summary(), "replayed": moment(one.replayed_ms or 0)}),
                soft_wrap=True,
                markup=False,
            )
        return
    if not rows:
        out.print("no dead letters")
        return
    from rich.table import Table

    table = Table(box=None, padding=(0, 2))
    for column in ("id", "when", "reason", "stage", "source", "feature", "what"):
        table.add_column(column, overflow="fold" if column == "what" else "ellipsis", no_wrap=column != "what")
    for one in rows[-limit:]:
        plain = one.letter.summary()
        what = " ".join(str(plain[name]) for name in ("field", "value", "limit", "explanation") if plain.get(name))
        when = (moment(one.letter.at_ms) or "")[:19]
        table.add_row(
            plain["id"][:12],
            when,
            plain["reason"],
            plain["stage"],
            plain["source"],
            plain["feature_id"] or "",
            what[:200],
        )
    out.print(table)
    out.print(f"{len(rows):,} dead letters; geo-assets dead-letters show ID prints one with its payload")


@family.command()
def show(
    letter_id: str = typer.Argument(..., metavar="ID", help="Its id, or the first characters of it."),
    raw: bool = typer.Option(False, "--raw", help="Print the payload alone, byte for byte."),
) -> None:
    """Show one dead letter with its raw payload."""
    from geo_assets.services.dead_letters import payload_of

    with open_home() as stack:
        letter = _one(stack, letter_id).letter
        try:
            payload = payload_of(stack, letter)
        except LookupError as fault:
            raise CliError(str(fault)) from None
    if raw:
        sys.stdout.buffer.write(payload)
        return
    out.print_json(json.dumps(letter.summary()))
    if letter.headers.get("kind") == "positions":
        out.print("payload hidden: a position is personal data; --raw prints it")
        return
    text = payload.decode("utf-8", "backslashreplace")
    out.print(
        text if len(text) <= 20_000 else f"{text[:20_000]}… ({len(payload):,} bytes; --raw prints all)",
        markup=False,
        soft_wrap=True,
    )


@family.command()
def replay(
    ids: list[str] = typer.Argument(None, metavar="[ID]...", help="Ids, or the first characters of them."),
    reason: str = typer.Option(None, help="All of this reason."),
    source: str = typer.Option(None, help="All of this source."),
    every: bool = typer.Option(False, "--all", help="All that were not replayed yet."),
    payload: Path = typer.Option(None, help="File with a mended payload to send instead, for a single id."),
) -> None:
    """Send dead letters on their way again, after what killed them was mended. Twice is harmless."""
    from geo_assets.services.dead_letters import replay as send

    if not (ids or reason or source or every):
        raise CliError("name ids, --reason, --source or --all")
    if payload is not None and (len(ids or []) != 1):
        raise CliError("--payload goes with exactly one id")
    with open_home() as stack:
        chosen = [_one(stack, one) for one in ids] if ids else _select(stack, reason, source, every=False)
        try:
            body = payload.read_bytes() if payload is not None else None
            count = send(stack, [one.letter for one in chosen], payload=body)
        except (LookupError, ValueError) as fault:
            raise CliError(str(fault)) from None
    out.print(f"replayed {count:,}; geo-assets dead-letters list shows those that die again")


def _select(stack: Stack, reason: str | None, source: str | None, every: bool) -> list[Listed]:
    from geo_assets.events.dead_letter import REASONS
    from geo_assets.services.dead_letters import list_dead_letters

    if reason is not None and reason not in REASONS:
        raise CliError(f"reason {reason!r} is none of {', '.join(REASONS)}")
    rows = list_dead_letters(
        stack.log,
        lambda letter: (reason is None or letter.reason == reason) and (source is None or letter.source == source),
    )
    return [one for one in rows if every or one.replayed_ms is None]


def _one(stack: Stack, letter_id: str) -> Listed:
    from geo_assets.services.dead_letters import list_dead_letters

    found = list_dead_letters(stack.log, lambda letter: letter.id.startswith(letter_id))
    if len(found) != 1:
        count = "no dead letter has" if not found else f"{len(found)} dead letters have"
        raise CliError(f"{count} an id that begins with {letter_id[:40]!r}; geo-assets dead-letters list shows them")
    return found[0]
