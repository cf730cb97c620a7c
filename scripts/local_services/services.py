"""All local services of one folder, and the file of settings that leads to them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.local_services.cache import Cache
from scripts.local_services.faults import UnknownService
from scripts.local_services.kafka import Kafka
from scripts.local_services.postgres import Postgres
from scripts.local_services.processes import lives, memory_bytes
from scripts.local_services.redis import Redis
from scripts.local_services.s3 import S3
from scripts.local_services.service import CHECKOUT, HOST, Service, write_private

STANDARD = ("kafka", "redis", "postgres", "s3")
"""What `start` starts when no name is given."""

CACHE = "cache"
"""Started by name only: it needs a backend."""

_CLASSES: tuple[type[Service], ...] = (Kafka, Redis, Postgres, S3, Cache)


def default_folder() -> Path:
    """Where the services' data is unless told otherwise: `.services` in the checkout, or GEO_ASSETS_SERVICES."""
    return Path(os.environ.get("GEO_ASSETS_SERVICES") or CHECKOUT / ".services")


@dataclass(frozen=True, slots=True)
class Status:
    """How one service stands."""

    name: str
    state: str
    """`running`, `killed` (its process is gone and nobody stopped it), `stopped`, or `never started`."""
    pid: int | None
    address: str | None
    memory_bytes: int


class Services:
    """The services of one folder; several processes may use the same one."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or default_folder()).resolve()
        cache = CHECKOUT / ".services" / "downloads"
        self._services = {each.name: each(self.folder / each.name, cache) for each in _CLASSES}

    def start(self, *names: str, backend: str | None = None) -> None:
        """Start the named ones, or the standard ones, and wait until each answers; one that runs is left alone.

        Args:
            names: of services; none for kafka, redis, postgres and s3.
            backend: `HOST:PORT` behind the cache; it may start later than the cache.

        Raises:
            ServiceFault: the first one that did not start; those that did keep running.
        """
        chosen = [self._service(name) for name in names or STANDARD]
        options: dict[str, dict[str, Any]] = {CACHE: {"backend": backend} if backend else {}}
        with ThreadPoolExecutor(len(chosen)) as pool:
            started = [pool.submit(each.start, options.get(each.name, {})) for each in chosen]
        self._write_settings()
        for each in started:
            each.result()

    def stop(self, *names: str) -> None:
        """Stop the named ones, or all; data stays."""
        chosen = [self._service(name) for name in names or self._services]
        with ThreadPoolExecutor(len(chosen)) as pool:
            list(pool.map(lambda each: each.stop(), chosen))
        self._write_settings()

    def kill(self, *names: str) -> None:
        """Kill -9 the named ones; their settings stay, and `start` brings them back on the same ports."""
        for name in names:
            self._service(name).kill()

    def restart(self, *names: str) -> None:
        """Stop and start the named ones, or the standard ones."""
        chosen = names or STANDARD
        for name in chosen:
            self._service(name).stop()
        self.start(*chosen)

    def remove(self, *names: str) -> None:
        """Stop the named ones, or all, and delete their data."""
        chosen = [self._service(name) for name in names or self._services]
        with ThreadPoolExecutor(len(chosen)) as pool:
            list(pool.map(lambda each: each.remove(), chosen))
        self._write_settings()

    def settings(self) -> dict[str, str]:
        """Environment variables of all that were started and not stopped."""
        found: dict[str, str] = {}
        for each in self._services.values():
            state = each.state()
            if state is not None and each.wanted():
                found |= each.settings(state)
        return found

    def status(self, *names: str) -> list[Status]:
        """How the named ones, or all, stand."""
        return [self._status(self._service(name)) for name in names or self._services]

    def log(self, name: str) -> Path:
        """The log file of one service."""
        return self._service(name).log

    def tail(self, name: str, lines: int = 40) -> str:
        """The last lines of one service's log."""
        return self._service(name).tail(lines)

    @property
    def settings_file(self) -> Path:
        """`services.env`: one KEY=VALUE a line, readable by its owner only."""
        return self.folder / "services.env"

    def _service(self, name: str) -> Service:
        if name not in self._services:
            raise UnknownService(f"there is no service {name!r}; there are {', '.join(self._services)}")
        return self._services[name]

    def _status(self, service: Service) -> Status:
        process, state = service.process(), service.state()
        address = None if state is None else f"{HOST}:{next(iter(state['ports'].values()))}"
        if process is not None and lives(process):
            return Status(service.name, "running", process.pid, address, memory_bytes(process))
        word = "killed" if process is not None else "never started" if state is None else "stopped"
        return Status(service.name, word, None, address, 0)

    def _write_settings(self) -> None:
        settings = self.settings()
        if not settings:
            self.settings_file.unlink(missing_ok=True)
            return
        lines = ["# Where scripts/services has started what; written anew by each start and stop."]
        lines += [f"{key}={value}" for key, value in settings.items()]
        write_private(self.settings_file, "\n".join(lines) + "\n")
