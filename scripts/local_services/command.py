"""The command line of `scripts/services`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.local_services.faults import ServiceFault
from scripts.local_services.services import STANDARD, Services, Status, default_folder

_NOT_RUNNING = 3
"""Exit code of `status` when something asked for does not run, as init scripts have it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a fault is one line on standard error, then the end of the service's log."""
    asked = _parser().parse_args(arguments)
    services = Services(asked.folder)
    try:
        return _run(services, asked)
    except ServiceFault as fault:
        print(fault, file=sys.stderr)
        if fault.tail:
            print("\n".join(f"    {line}" for line in fault.tail.splitlines()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(services: Services, asked: argparse.Namespace) -> int:
    names: list[str] = asked.names
    if asked.command == "start":
        begun = time.monotonic()
        services.start(*names, backend=asked.backend)
        _show(services.status(*(names or STANDARD)))
        print(f"{time.monotonic() - begun:.1f} s; settings: {services.settings_file}")
    elif asked.command == "stop":
        services.stop(*names)
    elif asked.command == "restart":
        services.restart(*names)
        _show(services.status(*(names or STANDARD)))
    elif asked.command == "kill":
        services.kill(*names)
    elif asked.command == "remove":
        services.remove(*names)
    elif asked.command == "logs":
        for each in services.status(*names):
            if services.log(each.name).exists():
                print(f"== {services.log(each.name)}")
                print(services.tail(each.name, asked.lines))
    else:
        found = services.status(*names)
        _show(found)
        needed = [each for each in found if names or each.name in STANDARD]
        return 0 if all(each.state == "running" for each in needed) else _NOT_RUNNING
    return 0


def _show(found: list[Status]) -> None:
    for each in found:
        pid = f"pid {each.pid}" if each.pid else ""
        memory = f"{each.memory_bytes / 1e6:6.0f} MB" if each.memory_bytes else ""
        print(f"{each.name:9} {each.state:14} {each.address or '':22} {pid:12} {memory}".rstrip())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/services",
        description="Real services on loopback and free ports: kafka, redis, postgres (with PostGIS), s3, cache.",
        epilog="Without names: start takes all but the cache, which needs a backend; the other commands all.",
    )
    parser.add_argument("--folder", type=Path, default=default_folder(), help="where the data is; %(default)s")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, needed, text in (
        ("start", "*", "start, and wait until each answers; writes services.env"),
        ("stop", "*", "stop; data stays"),
        ("status", "*", "say what runs; exit code 3 when something does not"),
        ("restart", "*", "stop and start"),
        ("kill", "+", "kill -9, for tests of faults; start brings it back on the same port"),
        ("logs", "*", "the end of the logs"),
        ("remove", "*", "stop, and delete the data"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("names", nargs=needed, metavar="NAME")
        if name == "start":
            command.add_argument("--backend", metavar="HOST:PORT", help="what the cache stands in front of")
        if name == "logs":
            command.add_argument("--lines", type=int, default=40)
        # Before or after the command, as people write it.
        command.add_argument("--folder", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser
