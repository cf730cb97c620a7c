"""Postgres with PostGIS, a superuser for the tests and a role without privileges that owns the platform's database."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.local_services.faults import MissingProgram, NotReady
from scripts.local_services.service import HOST, Service, write_private

_PACKAGE = "Debian and Ubuntu have it in the packages postgresql and postgresql-postgis"
_DATABASE = "geo_assets"


class Postgres(Service):
    """One cluster, durable (fsync), reached over TCP with a password only."""

    name = "postgres"
    ports = ("postgres",)
    secrets = ("admin_password", "password")
    # Fast shutdown: open sessions are ended, not waited for.
    stop_signal = signal.SIGINT

    def check_programs(self) -> None:
        self._programs()
        if not any(self._extensions().glob("postgis.control")):
            raise MissingProgram(f"PostGIS is not installed for {self._programs().parent}: {_PACKAGE}")

    def prepare(self, state: dict[str, Any]) -> None:
        data = self._data()
        if not (data / "PG_VERSION").exists():
            shutil.rmtree(data, ignore_errors=True)
            data.parent.mkdir(parents=True, exist_ok=True)
            data.mkdir(mode=0o700)
            self._own(data)
            with tempfile.NamedTemporaryFile("w", suffix=".password") as password:
                password.write(state["secrets"]["admin_password"])
                password.flush()
                self._own(Path(password.name))
                made = subprocess.run(
                    [
                        str(self._programs() / "initdb"),
                        *("-D", str(data), "-U", "postgres", "-A", "scram-sha-256", f"--pwfile={password.name}"),
                        *("--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions"),
                    ],
                    capture_output=True,
                    text=True,
                    check=False,
                    **self.popen_options(),
                )
            if made.returncode:
                shutil.rmtree(data, ignore_errors=True)
                raise NotReady("postgres: initdb failed", made.stderr.strip()[-2_000:])

    def command(self, state: dict[str, Any]) -> list[str]:
        options = {
            "listen_addresses": HOST,
            "port": state["ports"]["postgres"],
            "unix_socket_directories": "",
            "max_connections": 200,
            "fsync": "on",
            "shared_buffers": "128MB",
            "max_wal_size": "1GB",
            "logging_collector": "off",
            "log_timezone": "UTC",
            "timezone": "UTC",
        }
        chosen = [part for key, value in options.items() for part in ("-c", f"{key}={value}")]
        return [str(self._programs() / "postgres"), "-D", str(self._data()), *chosen]

    def answers(self, state: dict[str, Any]) -> bool:
        return self._psql(state, "postgres", "SELECT 1").returncode == 0

    def finish(self, state: dict[str, Any]) -> None:
        if state.get("database_made"):
            return
        password = state["secrets"]["password"]
        for database, statement in (
            ("postgres", f"CREATE ROLE {_DATABASE} LOGIN PASSWORD '{password}'"),
            ("postgres", f"CREATE DATABASE {_DATABASE} OWNER {_DATABASE}"),
            (_DATABASE, "CREATE EXTENSION IF NOT EXISTS postgis"),
        ):
            done = self._psql(state, database, statement)
            if done.returncode and "already exists" not in done.stderr:
                problem = done.stderr.strip().splitlines()[0] if done.stderr.strip() else "psql failed"
                raise NotReady(f"postgres: {problem.replace(password, '…')}")
        state["database_made"] = True
        write_private(self.folder / "state.json", json.dumps(state, indent=1))

    def settings(self, state: dict[str, Any]) -> dict[str, str]:
        where = f"{HOST}:{state['ports']['postgres']}"
        return {
            "GEO_ASSETS_POSTGRES_URL": f"postgresql://{_DATABASE}:{state['secrets']['password']}@{where}/{_DATABASE}",
            "TEST_POSTGRES_ADMIN_URL": f"postgresql://postgres:{state['secrets']['admin_password']}@{where}/{_DATABASE}",
        }

    def popen_options(self) -> dict[str, Any]:
        # Postgres refuses to run as root.
        user = self._user()
        options: dict[str, Any] = {"cwd": "/"}
        if user is not None:
            options |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        return options

    def outside(self) -> Sequence[Path]:
        data = self._data()
        return () if data == self.data else (data.parent,)

    def _data(self) -> Path:
        """The cluster's folder: elsewhere when its user may not enter the service's folder (a root's home)."""
        user = self._user()
        if user is None:
            return self.data
        self.folder.mkdir(parents=True, exist_ok=True)
        entered = subprocess.run(["test", "-x", str(self.folder)], check=False, **self.popen_options())
        if entered.returncode == 0:
            return self.data
        name = hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:12]
        return Path("/var/tmp") / f"geo_assets-postgres-{name}" / "data"

    def _own(self, path: Path) -> None:
        user = self._user()
        if user is not None:
            os.chown(path, user.pw_uid, user.pw_gid)

    def _user(self) -> pwd.struct_passwd | None:
        if os.geteuid() != 0:
            return None
        for name in ("postgres", "nobody"):
            try:
                return pwd.getpwnam(name)
            except KeyError:
                continue
        raise MissingProgram("postgres refuses to run as root, and there is no user postgres or nobody here")

    def _programs(self) -> Path:
        """Folder of the newest release's programs."""
        found = [p.parent for p in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
        found.sort(key=lambda folder: int(re.sub(r"\D", "", folder.parent.name) or 0))
        # A release that PostGIS is installed for comes before a newer one without.
        with_postgis = [
            p for p in found if (Path("/usr/share/postgresql") / p.parent.name / "extension/postgis.control").exists()
        ]
        if with_postgis or found:
            return (with_postgis or found)[-1]
        on_path = shutil.which("initdb")
        if on_path is None:
            raise MissingProgram(f"initdb is not installed: {_PACKAGE}")
        return Path(on_path).resolve().parent

    def _extensions(self) -> Path:
        debian = Path("/usr/share/postgresql") / self._programs().parent.name / "extension"
        if debian.exists():
            return debian
        shown = subprocess.run(["pg_config", "--sharedir"], capture_output=True, text=True, check=False)
        return Path(shown.stdout.strip()) / "extension"

    def _psql(self, state: dict[str, Any], database: str, statement: str) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
        return subprocess.run(
            [
                str(self._programs() / "psql"),
                *("-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-h", HOST, "-p", str(state["ports"]["postgres"])),
                *("-U", "postgres", "-d", database, "-f", "-"),
            ],
            input=statement,
            capture_output=True,
            text=True,
            check=False,
            env=environment | {"PGPASSWORD": state["secrets"]["admin_password"], "PGCONNECT_TIMEOUT": "5"},
        )
