"""One schema of a Postgres database to a file and back, by Postgres' own programs. No rows and no rules."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict

from resources.postgres import conninfo, signed, where

_DEBIAN = Path("/usr/lib/postgresql")
"""Where Debian keeps the programs of each release."""


class DumpError(Exception):
    """pg_dump, pg_restore or psql could not do it, or is not there."""


def dump(url: str, schema: str, path: Path) -> None:
    """Write one snapshot of a schema, compressed; others go on reading and writing.

    Raises:
        DumpError: pg_dump is missing, older than the server, or refused; the message says why.
        psycopg.Error: The server cannot be reached.
    """
    program = _program("pg_dump", _server(url))
    # Owners and grants belong to where it is restored.
    options = ["--format=custom", f"--schema={schema}", "--no-owner", "--no-privileges", f"--file={path}"]
    _run([program, *options], url)


def restore(url: str, schema: str, path: Path) -> None:
    """Replace a schema by the one in the file, in one transaction: all of it or nothing.

    Raises:
        DumpError: A program is missing or refused; the schema is as it was.
        psycopg.Error: The server cannot be reached.
    """
    server = _server(url)
    script = path.with_suffix(".sql")
    try:
        _run([_program("pg_restore", server), "--no-owner", "--no-privileges", f"--file={script}", str(path)], url)
        drop = f'DROP SCHEMA IF EXISTS "{schema}" CASCADE'
        _run(
            [
                *(_program("psql", server), "--no-psqlrc", "--quiet", "--single-transaction"),
                *("--set=ON_ERROR_STOP=1", f"--command={drop}", f"--file={script}"),
            ],
            url,
        )
    finally:
        script.unlink(missing_ok=True)


def sessions(url: str, schema: str) -> int:
    """How many other sessions of this program work in the schema now."""
    target = conninfo(url, schema)
    with psycopg.connect(target) as connection:
        found = connection.execute(
            """SELECT count(*) FROM pg_stat_activity
               WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name = %s""",
            (conninfo_to_dict(target)["application_name"],),
        ).fetchone()
    return found[0] if found else 0


def _server(url: str) -> int:
    """The server's major release."""
    with psycopg.connect(conninfo(url)) as connection:
        return connection.info.server_version // 10_000


def _program(name: str, server: int) -> str:
    """The newest release of a program on this machine; it must not be older than the server."""
    candidates = [*_DEBIAN.glob(f"*/bin/{name}")]
    found = shutil.which(name)
    if found is not None:
        candidates.append(Path(found))
    releases = {program: _release(program) for program in candidates}
    if not releases:
        raise DumpError(f"{name} is not installed here: install the client programs of Postgres {server}")
    newest = max(releases, key=lambda program: releases[program])
    if releases[newest] < server:
        raise DumpError(
            f"{name} is of release {releases[newest]} and the server of {server}: install the client programs of "
            f"Postgres {server}"
        )
    return str(newest)


def _release(program: Path) -> int:
    shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"\) (\d+)", shown)
    return int(match[1]) if match else 0


def _run(command: list[str], url: str) -> None:
    done = subprocess.run(command, env=_environment(url), capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line or "error:" in line] or ["failed"]
        raise DumpError(f"{Path(command[0]).name} of {where(url)}: {' '.join(lines[0].split())[:300]}")


def _environment(url: str) -> dict[str, str]:
    """Everything in the URL as libpq's variables: a command line is there for every user of the machine to see."""
    given = conninfo_to_dict(signed(url))
    variables = {
        option.keyword.decode(): option.envvar.decode() for option in pq.Conninfo.get_defaults() if option.envvar
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return (
        kept
        | {variables[name]: str(value) for name, value in given.items() if name in variables}
        | {
            # A library's notice for each table that a DROP takes along says nothing.
            "PGOPTIONS": f"{given.get('options') or ''} -c client_min_messages=warning".strip(),
        }
    )
