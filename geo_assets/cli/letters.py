"""`geo-assets dead-letters`: list, show and replay records that could not be processed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from geo_assets.cli.answers import CliError, err, escape, open_home, out

if TYPE_CHECKING:
    from geo_assets.services.dead_letters import Listed
    from geo_assets.services.replaying import Chosen
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
    stage: str = typer.Option(None, help="Only those that died at this stage."),
    since: str = typer.Option(None, help="Only those that died since: 2h, 3d, or a time such as 2026-05-01T12:00Z."),
    every: bool = typer.Option(False, "--all", help="Also those that were replayed."),
    limit: int = typer.Option(50, min=1, help="Most rows."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON lines for programs."),
) -> None:
    """List dead letters, newest last."""
    from geo_assets.services.replaying import select
    from geo_assets.services.status import moment

    with open_home() as stack:
        chosen = _chosen(reason, source, stage, since)
        rows = select(stack, chosen, every=every)
    if as_json:
        for one in rows[-limit:]:
            out.print(
                json.dumps({**one.letter.summary(), "replayed": moment(one.replayed_ms or 0)}),
                soft_wrap=True,
                markup=False,
            )
        return
    if not rows:
        also = "" if every else "; --all looks at those that were replayed as well"
        out.print(f"no dead letter is one of these{also}" if chosen.narrow else f"no dead letters{also}")
        return
    from rich.table import Table

    table = Table(box=None, padding=(0, 2))
    columns = ("id", "when", "reason", "stage", "source", "feature", *(("replayed",) if every else ()), "what")
    for column in columns:
        table.add_column(column, overflow="fold" if column == "what" else "ellipsis", no_wrap=column != "what")
    for one in rows[-limit:]:
        plain = one.letter.summary()
        cells = [plain["id"][:12], _when(one.letter.at_ms), plain["reason"], plain["stage"], plain["source"]]
        cells += [plain["feature_id"] or "", *((_when(one.replayed_ms or 0),) if every else ()), _what(plain)]
        table.add_row(*map(escape, cells))
    out.print(table)
    out.print(f"{len(rows):,} dead letters; geo-assets dead-letters show ID prints one with its payload")


def _when(ms: int) -> str:
    from geo_assets.services.status import moment

    return (moment(ms) or "")[:19]


def _what(plain: dict[str, Any]) -> str:
    """What is wrong, in a line: the field, why, its value and what it may be."""
    from geo_assets.events.json_text import shorten

    got = f"got {shorten(plain['value'])}" if plain["value"] is not None else ""
    allowed = f"allowed: {shorten(plain['limit'])}" if plain["limit"] else ""
    beside = "; ".join(part for part in (got, allowed) if part)
    said = ": ".join(part for part in (plain["field"], plain["explanation"]) if part)
    return f"{said} ({beside})" if beside else said


@family.command()
def show(
    letter_id: str = typer.Argument(..., metavar="ID", help="Its id, or the first characters of it."),
    raw: bool = typer.Option(False, "--raw", help="Print the payload alone, byte for byte."),
    reveal: bool = typer.Option(False, "--reveal", help="Print also what tells where a device is."),
) -> None:
    """Show one dead letter with its raw payload."""
    from geo_assets.services.dead_letters import payload_of, read_letter
    from geo_assets.services.replaying import select

    with open_home() as stack:
        try:
            letter = read_letter(stack.log, _one(select(stack, _chosen(), every=True), letter_id))
            payload = payload_of(stack, letter)
        except LookupError as fault:
            raise CliError(str(fault)) from None
    kind = letter.headers.get("kind")
    personal = letter.stage == "route" or kind in ("positions", "triggers")
    if personal and not reveal:
        if raw:
            raise CliError("where a device is is personal data: say --reveal as well")
        out.print_json(json.dumps(letter.summary()))
        out.print("payload hidden: where a device is is personal data; --reveal prints it")
        return
    if raw:
        sys.stdout.buffer.write(payload)
        return
    out.print_json(json.dumps(letter.summary()))
    text = _trigger_text(payload) if kind == "triggers" else payload.decode("utf-8", "backslashreplace")
    out.print(
        text if len(text) <= 20_000 else f"{text[:20_000]}… ({len(payload):,} bytes; --raw prints all)",
        markup=False,
        soft_wrap=True,
    )


def _trigger_text(frame: bytes) -> str:
    """The members of a trigger, where it is one."""
    from geo_assets.geofence.frames import FrameError, decode, to_json

    try:
        return json.dumps(to_json(decode(frame)), ensure_ascii=False)
    except FrameError:
        return frame.decode("utf-8", "backslashreplace")


@family.command()
def replay(
    ids: list[str] = typer.Argument(None, metavar="[ID]...", help="Ids, or the first characters of them."),
    file: Path = typer.Option(
        None, "--ids", exists=True, allow_dash=True, help="File with an id a line; - reads them."
    ),
    reason: str = typer.Option(None, help="All of this reason."),
    source: str = typer.Option(None, help="All of this source."),
    stage: str = typer.Option(None, help="All that died at this stage, such as validate or route."),
    since: str = typer.Option(None, help="All that died since: 2h, 3d, or a time such as 2026-05-01T12:00Z."),
    every: bool = typer.Option(False, "--all", help="All that were not replayed yet."),
    limit: int = typer.Option(10_000, min=1, help="Most that are sent; the oldest first."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Say how many would go where, and send nothing."),
    payload: Path = typer.Option(None, help="File with a mended payload to send instead, for a single id."),
) -> None:
    """Send dead letters on their way again, each to where it came from. Twice is harmless.

    Edits go back to raw, fences to fences, positions to positions, tiles to tiles; triggers go out by the routing run.
    """
    from geo_assets.services.replaying import homes, select, send

    chosen = _chosen(reason, source, stage, since)
    named = [*(ids or []), *(_lines(file) if file is not None else [])]
    if not (named or every or chosen.narrow):
        raise CliError("name ids, --ids, --reason, --source, --stage, --since or --all")
    if payload is not None and len(named) != 1:
        raise CliError("--payload goes with exactly one id")
    with open_home() as stack:
        rows = select(stack, chosen, every=bool(named))
        if named:
            rows = list({one.letter.id: one for one in (_one(rows, name) for name in named)}.values())
        over = len(rows) - limit
        rows = rows[:limit]
        if dry_run:
            for home, count in homes(rows).items():
                out.print(f"{count:,} to {home}")
            out.print(f"{len(rows):,} would be replayed" + (f", {over:,} more are left (--limit)" if over > 0 else ""))
            return
        body = payload.read_bytes() if payload is not None else None
        done = send(stack, rows, body, lambda looked_at: err.print(f"{looked_at:,} of {len(rows):,}"))
        if done.triggers:
            _route(stack)
    for why in done.unfit[:20]:
        err.print(why, markup=False, soft_wrap=True)
    if done.unfit:
        raise CliError(f"replayed {done.count:,}; {len(done.unfit):,} could not be sent as they are")
    more = f"; {over:,} more are left: give it again" if over > 0 else ""
    out.print(f"replayed {done.count:,}{more}; geo-assets dead-letters list shows those that die again")


def _route(stack: Stack) -> None:
    """Have the routing run send triggers; where none routes, this process does."""
    from dataclasses import replace as changed

    from geo_assets.services import resending, routing

    options = changed(routing.options_of(stack.settings), idle_s=0.0, run_s=None, wait_s=0.0, metrics_port=None)
    routing.route(stack, options)
    deadline = time.monotonic() + 30.0
    while resending.wishes(stack.ledger):
        if time.monotonic() > deadline:
            err.print("triggers wait for the routing run, which sends them when the log takes them")
            return
        time.sleep(0.1)


def _chosen(
    reason: str | None = None, source: str | None = None, stage: str | None = None, since: str | None = None
) -> Chosen:
    from geo_assets.services.replaying import ChoiceError, Chosen, moment_of

    try:
        return Chosen(reason, source, stage, None if since is None else moment_of(since))
    except ChoiceError as fault:
        raise CliError(str(fault)) from None


def _one(rows: list[Listed], letter_id: str) -> Listed:
    found = [one for one in rows if one.letter.id.startswith(letter_id)]
    if len(found) != 1:
        count = "no dead letter has" if not found else f"{len(found)} dead letters have"
        raise CliError(f"{count} an id that begins with {letter_id[:40]!r}; geo-assets dead-letters list shows them")
    return found[0]


def _lines(file: Path) -> list[str]:
    text = sys.stdin.read() if str(file) == "-" else file.read_text("utf-8")
    return [line.strip() for line in text.splitlines() if line.strip()]
