"""`geo-assets up`: every service and Dagster in one terminal, with one readable log and one clean stop."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from geo_assets.cli.answers import CliError, check_writable, logged_settings, out

if TYPE_CHECKING:
    from collections.abc import Callable

    from geo_assets.services.sole_up import SoleUp
    from geo_assets.services.supervisor import Child, Supervisor
    from geo_assets.settings import Settings

COLOURS = {
    "edge": "cyan",
    "ingest": "magenta",
    "live": "bright_green",
    "tiles": "green",
    "dagster": "blue",
    "sample": "yellow",
    "simulate": "yellow",
    "up": "white",
}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Start here")(up)


def up(
    sample: bool = typer.Option(
        False, "--sample", help="Import central Helsinki (OpenStreetMap) first, if it is not there yet."
    ),
    open_browser: bool = typer.Option(False, "--open", help="Open the map in a browser when it is ready."),
    edge_port: int = typer.Option(None, help="Port of the edge (env GEO_ASSETS_EDGE_PORT, default 8787)."),
    tiles_port: int = typer.Option(None, help="Port of map and tiles (env GEO_ASSETS_TILES_PORT, default 8788)."),
    dagster_port: int = typer.Option(None, help="Port of the Dagster UI (env GEO_ASSETS_DAGSTER_PORT, default 3000)."),
    stack: str = typer.Option(
        None, help="`production`: on the Kafka, Redis, PostGIS and S3 that the settings name (env GEO_ASSETS_STACK)."
    ),
    switch_stack: bool = typer.Option(
        False, "--switch-stack", help="Let this home leave the services it works on; what they hold stays there."
    ),
    simulate: bool = typer.Option(False, "--simulate", help="Have devices move through the sample city."),
    devices: int = typer.Option(200, min=1, help="How many, with --simulate."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Show every line that Dagster prints."),
) -> None:
    """Run everything here until Ctrl-C: edge, ingest, fast lane, tile server, Dagster's UI and daemon.

    Data lives in the home folder (GEO_ASSETS_HOME); nothing needs to be installed. Start it again and it goes on where
    it was, also after a power cut. With --stack production the data lives in the services that the settings name.
    """
    from geo_assets import dagster_home
    from geo_assets.services.draining import LAST_S
    from geo_assets.services.supervisor import Child, Supervisor

    current = logged_settings(edge_port=edge_port, tiles_port=tiles_port, dagster_port=dagster_port, stack=stack)
    os.environ["GEO_ASSETS_HOME"] = str(current.home)
    check_writable(current)
    check_leaving(current, switch_stack)
    room = shutil.disk_usage(current.home).free
    if room < 200_000_000:
        raise CliError(
            f"home {current.home} has {room // 1_000_000} MB free, 200 MB are needed; "
            "set GEO_ASSETS_HOME to another disk"
        )
    printer = Printer(verbose)
    stop_s = current.shutdown_delay_s + current.drain_s + LAST_S
    supervisor = Supervisor(current.home, printer.line, stop_s)
    left = supervisor.claim()
    if left:
        printer.line("up", f"ended {left} processes that a killed predecessor left")
    sole: SoleUp | None = None
    try:
        check_ports(current)
        # Before anything is changed in services that another one may be working on.
        sole = hold_stack(current, lambda text: printer.line("up", text))
        prepare(current)
        folder = dagster_home.prepare(current)
        follow_switch(current, printer)
        follow_partition_zooms(current, printer)
    except BaseException:
        supervisor.stop()
        if sole is not None:
            sole.release()
        raise
    asked = threading.Event()

    def stop() -> None:
        printer.stopping = True
        supervisor.stopping.set()
        asked.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop())
    me = [sys.executable, "-m", "geo_assets.cli"]
    try:
        # What takes longest starts first.
        environment = dagster_home.environment(current, folder)
        dagster = Child("dagster", dagster_home.command(current), environment, signal.SIGINT, background=True)
        supervisor.start(dagster)
        for name in ("edge", "ingest", "tiles"):
            supervisor.start(Child(name, [*me, name]))
        for number in range(current.live_workers):
            # The others' metrics are theirs to place: one port is one process's.
            port = {} if number == 0 else {"GEO_ASSETS_LIVE_PORT": "0"}
            supervisor.start(Child("live" if number == 0 else f"live-{number + 1}", [*me, "live"], port))
        moving = Child("simulate", simulate_command(me, devices)) if simulate else None
        _run(supervisor, current, printer, asked, me if sample else None, open_browser, moving)
    finally:
        printer.line("up", "stopping")
        supervisor.stop()
        if sole is not None:
            sole.release()  # After the last run of this one has ended.
        printer.line("up", "stopped")


def _run(
    supervisor: Supervisor,
    current: Settings,
    printer: Printer,
    asked: threading.Event,
    sample: list[str] | None,
    open_browser: bool,
    moving: Child | None,
) -> None:
    from geo_assets.services import sample as samples

    started = time.monotonic()
    if sample is not None and not asked.is_set():
        samples.ensure(current, lambda text: printer.line("sample", text), asked)
    waiting = {
        "edge": f"{current.edge_url}/healthz",
        "tiles": f"{current.tiles_url}/healthz",
        "dagster": f"{current.dagster_url}/server_info",
    }
    ready = False
    said = ""

    def say(text: str) -> None:
        nonlocal said
        if text != said:
            printer.line("up", said := text)

    while not asked.wait(0.5):
        broken = supervisor.watch()
        if broken is not None:
            raise CliError(f"{broken} ends as soon as it starts: its lines above say why")
        if ready:
            continue
        waiting = {name: url for name, url in waiting.items() if not answers(url)}
        if waiting:
            if time.monotonic() - started > current.start_timeout_s:
                raise CliError(
                    f"{', '.join(waiting)} did not answer within {current.start_timeout_s:g} s "
                    "(GEO_ASSETS_START_TIMEOUT_S); their lines above say why"
                )
            continue
        if samples.progress(current, say):
            ready = True
            printer.banner(current, time.monotonic() - started)
            if moving is not None:
                supervisor.start(moving)  # Once there is an edge to send to.
            if open_browser:
                import webbrowser

                webbrowser.open(current.tiles_url)


def simulate_command(me: list[str], devices: int) -> list[str]:
    """The command line of the simulator that runs beside the services until they end."""
    return [*me, "simulate", "--devices", str(devices), "--minutes", "0", "--prefix", "", "--every", "60"]


def answers(url: str) -> bool:
    """Whether a service answers 200 there."""
    import httpx

    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def check_ports(current: Settings) -> None:
    """See that every port is free before anything starts.

    Raises:
        CliError: One is taken; the line names it and the setting to change.
    """
    ports = {"EDGE": current.edge_port, "TILES": current.tiles_port, "DAGSTER": current.dagster_port}
    if len(set(ports.values())) < len(ports):
        raise CliError(f"edge, tiles and dagster need three different ports, not {', '.join(map(str, ports.values()))}")
    for name, port in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((current.host, port))
            except OSError as fault:
                raise CliError(
                    f"port {port} of {current.host} is taken ({fault.strerror}); "
                    f"set GEO_ASSETS_{name}_PORT to a free one"
                ) from None


def check_leaving(current: Settings, switch: bool) -> None:
    """See that this home leaves no service behind by mistake: with a terminal that lacks their settings.

    Raises:
        CliError: It would, and the flag does not say so.
    """
    from geo_assets import home_stack

    known, present = home_stack.read(current.home), home_stack.places_of(current)
    if known and not switch and (names := home_stack.lacking(known, present)):
        raise CliError(
            f"home {current.home} works on {home_stack.told(known)}, these settings name none of "
            f"{home_stack.variables(names)}: source them first, or say --switch-stack to leave them on purpose"
        )


def follow_switch(current: Settings, printer: Printer) -> None:
    """Say in the home which stack it works on from now on."""
    from geo_assets import home_stack

    known, present = home_stack.read(current.home), home_stack.places_of(current)
    if known and home_stack.other(known, present):
        printer.line("up", f"this home worked on {home_stack.told(known)}, now on {home_stack.told(present)}")
    home_stack.write(current)


def follow_partition_zooms(current: Settings, printer: Printer) -> None:
    """Bring the catalog to the partition zooms of the settings, before anything runs that works on partitions."""
    from geo_assets.partitions import CATALOG_VALUE
    from geo_assets.stack import Stack

    with Stack(current) as stack:
        if not current.partitions.differ_from(stack.ledger.get_value(CATALOG_VALUE)):
            return
        # Dagster is imported only now: a start without a change does without it.
        from geo_assets.catalog_partitions import RunsInTheWay, migrate
        from geo_assets.dagster_dev import end_lost_runs
        from geo_assets.dagster_instance import instance_of

        with instance_of(current) as instance:
            end_lost_runs(instance)
            printer.line("up", f"bringing the catalog to the partition zooms {current.partitions}")
            try:
                done = migrate(stack, instance, wait_s=0)
            except RunsInTheWay as fault:
                printer.line("up", str(fault))  # Runs that wait in the queue: they go on first.
            else:
                printer.line("up", f"{done.registered:,} partitions registered, {done.retired:,} retired")


def hold_stack(current: Settings, say: Callable[[str], None]) -> SoleUp | None:
    """Be the only `up` on services that others reach as well; None where all is in the home, which `claim` guards.

    Raises:
        ConfigurationError: Another one is, or Postgres cannot be reached.
    """
    if current.stack != "production":
        return None
    from geo_assets.services.sole_up import SoleUp

    sole = SoleUp(current, say)
    sole.take()
    return sole


def prepare(current: Settings) -> None:
    """Create every file, table and topic once, in one process, so that the services find it there.

    Raises:
        CliError: A service that the settings name cannot be used; the line says which, and why.
    """
    from geo_assets.cli import explain
    from geo_assets.services import native
    from geo_assets.services.layer_changes import follow_layers
    from geo_assets.services.migrating import migrate_all
    from geo_assets.services.reachable import looks
    from geo_assets.stack import Stack

    native.check(current)
    migrate_all(current)
    with Stack(current) as stack:
        follow_layers(stack.ensure())
    for name, look in looks(current):
        try:
            look()
        except Exception as fault:
            raise CliError(f"{name}: {explain(fault)}") from None


class Printer:
    """One readable log of several processes: a coloured name, then the line."""

    # Dagster says twice a minute that all is well, in colours; what it warns of matters.
    NOISE = ("Warning:", "warnings.warn", "return callback(", "dagster instance configuration value", "DEBUG", "INFO")

    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose
        self.stopping = False
        self._lock = threading.Lock()

    def line(self, name: str, text: str) -> None:
        """Print one line of a process."""
        shown = Text.from_ansi(text)
        if not shown.plain.strip():
            return
        # A run that Ctrl-C interrupts dies with its stack trace; its tiles are asked for again at the next start.
        noisy = self.stopping or any(noise in shown.plain for noise in self.NOISE)
        if name == "dagster" and noisy and not self._verbose:
            return
        with self._lock:
            out.print(Text(f"{name:>8} │ ", style=COLOURS.get(name, "white")).append_text(shown), soft_wrap=True)

    def banner(self, current: Settings, seconds: float) -> None:
        """Where everything is, and what to do next."""
        from rich.panel import Panel
        from rich.table import Table

        from geo_assets.services import sample as samples

        table = Table.grid(padding=(0, 2))
        table.add_row("[bold]Map[/bold]", current.tiles_url)
        table.add_row("[bold]Dagster[/bold]", current.dagster_url)
        table.add_row("[bold]Edge[/bold]", f"{current.edge_url}/v1/features")
        title = f"geo_assets is up ({seconds:.0f} s)"
        command = samples.edit_command(current)
        with self._lock:
            out.print(Panel(table, title=title, subtitle="Ctrl-C stops everything", expand=False))
            if command:
                # Outside the box and in one piece, however narrow the terminal: it is there to be pasted.
                out.print("[bold]Edit a building[/bold], in another terminal:")
                out.print(command, soft_wrap=True, markup=False, highlight=False)
