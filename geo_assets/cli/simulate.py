"""`geo-assets simulate`: devices on routes through the sample city, as a load or to look at."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import typer

from geo_assets.cli.answers import CliError, err, open_home, out

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

YEAR_MINUTES = 366 * 24 * 60
_UNITS = {"s": 1.0, "min": 60.0, "h": 3_600.0}
_RATE = re.compile(r"(\d+(?:\.\d+)?)(?:/(s|min|h))?")
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{0,64}")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Start here")(simulate)


def rate_of(text: str, option: str, least: str, most: str) -> float:
    """Times a second of `5/s`, `10/min`, `2`.

    Args:
        text: The rate.
        option: Of which option, for the message.
        least: The lowest rate.
        most: The highest rate.

    Raises:
        CliError: It is none, nothing, or outside its range.
    """
    rate = _a_second(text)
    shown_ = text if len(text) <= 40 else text[:40] + "…"
    if rate is None:
        raise CliError(f"{option} {shown_!r} is no rate above zero, such as 1/s, 0.5/s or 10/min")
    if not (_a_second(least) or 0.0) <= rate <= (_a_second(most) or 0.0):
        raise CliError(f"{option} {shown_!r} is outside {least} to {most}")
    return rate


def _a_second(text: str) -> float | None:
    match = _RATE.fullmatch(text.strip())
    rate = float(match[1]) / _UNITS[match[2] or "s"] if match is not None else 0.0
    return rate if rate > 0 else None


def simulate(
    devices: int = typer.Option(200, min=1, help="How many devices move."),
    rate: str = typer.Option("1/s", help="Positions of each device: 1/s, 10/min."),
    minutes: float = typer.Option(10.0, min=0, help="How long, in simulated time; 0 until Ctrl-C."),
    speed_up: float = typer.Option(
        1.0, min=1, max=1000, help="Simulated minutes in one; begins in the past, ends at the present."
    ),
    seed: int = typer.Option(1, min=0, help="Another number, other devices; the same one, the same devices again."),
    via: str = typer.Option("edge", help="`edge`: signed, over HTTP. `log`: straight to [positions], for load."),
    source: str = typer.Option(None, help="Source that signs (default: the only one)."),
    url: str = typer.Option(None, help="Edge to send to (default: the one of the settings)."),
    late: float = typer.Option(0.0, min=0, max=0.5, help="Share of positions that come after the one that follows."),
    duplicates: float = typer.Option(0.0, min=0, max=0.5, help="Share of positions that come twice."),
    jumps: float = typer.Option(0.0, min=0, max=0.5, help="Share of positions that are 111 km away."),
    edits: str = typer.Option(None, help="Moves buildings of the sample back and forth as well: 5/s."),
    watch: bool = typer.Option(False, "--watch", help="Count the triggers that come out, and time them."),
    prefix: str = typer.Option("sim-", help="Before each device's id, such as sim-car-00001."),
    every: float = typer.Option(5.0, min=0.1, help="Seconds between two lines, where the output is no terminal."),
    as_json: bool = typer.Option(False, "--json", help="The summary as JSON."),
) -> None:
    """Move devices along streets of central Helsinki and send where they are, whatever becomes of it.

    Positions leave when they are due: what the edge or the log cannot take waits, and shows as backlog.
    Where a device is follows from seed and time alone, so a simulation that is started again goes on.

    Examples:
        geo-assets simulate --watch

        geo-assets simulate --devices 20000 --rate 2/s --minutes 1 --via log

        geo-assets simulate --edits 5/s --late 0.02 --duplicates 0.02 --jumps 0.01
    """
    import json
    import signal
    import threading

    from geo_assets.cli.data import source_of
    from geo_assets.services.simulate.run import Options, Simulation
    from geo_assets.services.simulate.tally import SimulationError
    from geo_assets.simulation.fleet import FleetError
    from geo_assets.simulation.routes import RouteError

    # The fleet's own limits, as intervals: 120 s and 10 ms.
    rate_s = rate_of(rate, "--rate", "0.5/min", "100/s")
    edits_s = rate_of(edits, "--edits", "1/h", "1000/s") if edits else 0.0
    if minutes > YEAR_MINUTES:
        raise CliError(f"--minutes {minutes:g} is outside 0 to {YEAR_MINUTES:,}, a year")
    if via not in ("edge", "log"):
        raise CliError(f"via {via!r} is none of edge, log")
    if not _PREFIX.fullmatch(prefix):
        raise CliError(f"prefix {prefix!r} is not up to 64 letters, digits and _ . : -")
    stop = threading.Event()

    def end(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    with open_home() as stack:
        chosen = source_of(stack, source)
        base = (url or stack.settings.edge_url).rstrip("/")
        if via == "edge" or edits_s:
            check_edge(base)
        options = Options(
            devices=devices, rate_s=rate_s, minutes=minutes or None, speed_up=speed_up, seed=seed,
            via="edge" if via == "edge" else "log", url=base, prefix=prefix, late=late, duplicates=duplicates,
            jumps=jumps, edits_s=edits_s, watch=watch,
        )  # fmt: skip
        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            simulation = Simulation(stack, chosen, options)
            report = shown(simulation.run, stop, every)
        except (SimulationError, FleetError, RouteError) as fault:
            raise CliError(str(fault)) from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if as_json:
        out.print_json(json.dumps(report))
    else:
        for line in summary(report):
            out.print(line, markup=False)
    if report["made"] and not report["sent"]:
        raise CliError(f"no position was taken: {report['problem'] or 'none was answered'}")


def check_edge(base: str) -> None:
    """See that an edge answers there.

    Raises:
        CliError: None does, or it is not ready.
    """
    import httpx

    try:
        answer = httpx.get(f"{base}/readyz", timeout=10, trust_env=False)
    except httpx.HTTPError as fault:
        raise CliError(
            f"edge {base} cannot be reached ({fault}): start it with `geo-assets up --sample`, "
            "name another with --url, or do without it with --via log"
        ) from None
    if answer.status_code != 200:
        raise CliError(f"edge {base} is not ready: {answer.status_code} {answer.text[:200]}")


def shown(run: Callable[..., dict[str, Any]], stop: Any, every: float) -> dict[str, Any]:
    """Run it with a live table on a terminal, or a line now and then elsewhere."""
    import time

    if err.is_terminal:
        from rich.live import Live

        with Live(console=err, refresh_per_second=4, transient=True) as live:
            return run(stop, lambda report: live.update(table(report)))
    next_s = time.monotonic() + every

    def line(report: dict[str, Any]) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s += every
            err.print(one_line(report), markup=False, soft_wrap=True)

    return run(stop, line)


def table(report: dict[str, Any]) -> Table:
    """What a terminal shows while it runs."""
    from rich.table import Table

    shown_ = Table.grid(padding=(0, 2))
    for name, value in rows(report):
        shown_.add_row(f"[bold]{name}[/bold]", value)
    return shown_


def rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The report in words: name and value."""
    found = [
        ("devices", f"{report['devices']:,}"),
        ("positions", f"{report['sent']:,} of {report['made']:,} in {report['seconds']:,.0f} s"),
        ("rate", f"{report['achieved_s']:,.0f}/s of {report['asked_s']:,.0f}/s asked"),
        ("backlog", f"{report['waiting']:,} waiting, {report['behind_s']:g} s behind"),
    ]
    odd = {name: count for name, count in report["fates"].items() if name != "plain"}
    if odd:
        found.append(("odd ones", ", ".join(f"{count:,} {name}" for name, count in odd.items())))
    if report["answers"]:
        found.append(("answers", ", ".join(f"{count:,} x {status}" for status, count in report["answers"].items())))
    if report["refused"] or report["shed"]:
        found.append(("lost", f"{report['refused']:,} refused, {report['shed']:,} shed"))
    if report["acknowledged_ms"]:
        found.append(("acknowledged", _times(report["acknowledged_ms"])))
    if report["edits"]:
        found.append(("edits", ", ".join(f"{count:,} {name}" for name, count in report["edits"].items())))
    if report["triggers"]:
        found.append(("triggers", ", ".join(f"{count:,} {state}" for state, count in report["triggers"].items())))
    elif report["watched"]:
        found.append(("triggers", "none yet"))
    if report["trigger_ms"]:
        found.append(("position to trigger", _times(report["trigger_ms"])))
        if report["trigger_ms_last_minute"] != report["trigger_ms"]:
            # A routing run that had to be started first shows in the one and not in the other.
            found.append(("  in the last minute", _times(report["trigger_ms_last_minute"])))
    if report["problem"]:
        found.append(("last problem", report["problem"]))
    return found


def one_line(report: dict[str, Any]) -> str:
    """The report in one line."""
    return "; ".join(f"{name} {value}" for name, value in rows(report))


def summary(report: dict[str, Any]) -> list[str]:
    """The report at the end, a line a row."""
    width = max(len(name) for name, _ in rows(report))
    return [f"{name:<{width}}  {value}" for name, value in rows(report)]


def _times(milliseconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:,.0f} ms" for name, value in milliseconds.items())
