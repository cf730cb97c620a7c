"""Which stack a home belongs to: `stack.json`, written by `geo-assets up`, compared by every other command.

A terminal that lacks the services' settings would find an empty map in SQLite files that nobody serves. The file says
where things are and holds no secret.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from geo_assets.settings import Settings

NAME = "stack.json"

Places = Mapping[str, str | None]
"""What a setting says, by the setting's name in lower case without its prefix; None where its port is embedded."""


class StackFileError(Exception):
    """The home's file cannot be read; the message names it."""


def places_of(settings: Settings) -> dict[str, str | None]:
    """Where these settings keep things."""
    in_postgres = settings.postgres_url or settings.feature_store_url or settings.ledger_url
    return {
        "stack": settings.stack,
        "kafka_servers": settings.kafka_servers,
        "kafka_topic_prefix": settings.kafka_topic_prefix if settings.kafka_servers else None,
        "redis_prefix": settings.redis_prefix if settings.redis_url else None,
        "postgres_schema": settings.postgres_schema if in_postgres else None,
        "tile_store_url": settings.tile_store_url,
    }


def read(home: Path) -> dict[str, str | None] | None:
    """What the home's last `up` worked on; None where none ever did.

    Raises:
        StackFileError: The file is damaged.
    """
    path = home / NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): None if value is None else str(value) for name, value in found.items()}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, AttributeError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else "it is no JSON object"
        raise StackFileError(
            f"{path} cannot be read ({reason}): delete it, and `geo-assets up` writes it anew"
        ) from None


def write(settings: Settings) -> None:
    """Say what this home works on from now on: the whole file or none of it."""
    path = settings.home / NAME
    unfinished = path.with_name(f".{NAME}-{os.getpid()}")
    unfinished.write_text(json.dumps(places_of(settings), indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def other(known: Places, present: Places) -> list[str]:
    """Names of the settings by which two stacks differ.

    Args:
        known: What the home's file says.
        present: What the settings of this process say.
    """
    return [name for name in present if name in known and not _same(name, known[name], present[name])]


def lacking(known: Places, present: Places) -> list[str]:
    """Names of the settings that the home's stack has and these settings have not: services that would be left."""
    return [
        name
        for name in other(known, present)
        if present[name] is None or (name == "stack" and present[name] == "embedded")
    ]


def _same(name: str, one: str | None, two: str | None) -> bool:
    if name == "kafka_servers" and one and two:
        # Bootstrap servers: a list that names another broker of the same cluster as well is no other stack.
        return bool({*map(str.strip, one.split(","))} & {*map(str.strip, two.split(","))})
    if name == "tile_store_url" and one and two:
        return one.rstrip("/") == two.rstrip("/")
    return one == two


def told(places: Places) -> str:
    """A stack in words."""
    named = [f"{name} {value}" for name, value in places.items() if name != "stack" and value]
    return f"the {places.get('stack') or 'embedded'} stack" + (f" ({', '.join(named)})" if named else "")


def variables(names: list[str]) -> str:
    """The environment variables of settings."""
    return ", ".join(f"GEO_ASSETS_{name.upper()}" for name in names)
