"""Which events a line of the log is about: their ids under `event_ids`, so that one event is found at every stage.

For reading logs alone. A tile answers for all of its features and knows no events: what is told of it are the edits
whose hints a builder had in hand, as many as fit into a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

MOST_TOLD = 50
"""Ids of one line: of 36 characters each they are two kilobytes."""

DETAIL = "event_ids"
"""Member of a commit's details that hands them on to its announcement."""


def told_ids(ids: Iterable[str], most: int = MOST_TOLD) -> list[str]:
    """Distinct ids in their order, without empty ones, and how many more there are where they are too many."""
    known = list(dict.fromkeys(one for one in ids if one))
    return known if len(known) <= most else [*known[:most], f"and {len(known) - most} more"]


def ids_in(details: str) -> list[str]:
    """The ids in a commit's details (JSON); none where there are none."""
    if f'"{DETAIL}"' not in details:
        return []
    try:
        found = json.loads(details).get(DETAIL)
    except (ValueError, AttributeError):
        return []
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []
