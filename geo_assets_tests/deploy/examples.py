"""Reads the examples in deploy/settings: what they set, and what they show in comments."""

from __future__ import annotations

import re
from pathlib import Path

DEPLOY = Path(__file__).parents[2] / "deploy"
_LINE = re.compile(r"^(?P<comment># )?(?P<name>[A-Z][A-Z0-9_]*)=(?P<value>.*)$")


def read(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """What a file of KEY=VALUE lines sets, and what it shows in comments."""
    active: dict[str, str] = {}
    shown: dict[str, str] = {}
    for line in path.read_text().splitlines():
        found = _LINE.match(line)
        if found is not None:
            into = shown if found["comment"] else active
            assert found["name"] not in into, f"{path.name} names {found['name']} twice"
            into[found["name"]] = found["value"]
    return active, shown


def of_dagster() -> set[str]:
    """The variables that deploy/dagster.yaml reads."""
    return set(re.findall(r"\{env: (\w+)\}", (DEPLOY / "dagster.yaml").read_text()))
