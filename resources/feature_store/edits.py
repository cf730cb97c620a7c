"""What a batch of edits does to what stands: the protocol's rules of versions and event keys, without any storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from resources.feature_store.protocol import Applied, Change, Edit, EditOutcome, Feature, SourceTimes

Identity = tuple[str, str]
"""Source and feature id."""

Standing = tuple[int, str, Feature | None]
"""What stands for a feature: version, content hash, and the feature unless it is a tombstone."""


@dataclass(frozen=True, slots=True)
class Decided:
    """How each edit of a batch ends, and what is to be written of it."""

    applied: list[Applied] = field(default_factory=list[Applied])
    """One for each edit, in order."""
    changes: list[Change] = field(default_factory=list[Change])
    """Of the applied ones, in order."""
    last: dict[Identity, Edit] = field(default_factory=dict[Identity, Edit])
    """The last applied edit of each changed feature: what is left of it is that one's row or tombstone."""
    new_keys: dict[str, None] = field(default_factory=dict[str, None])
    """Event keys to record, each once."""


def check(edits: Sequence[Edit]) -> None:
    """Refuse edits that no caller may make.

    Raises:
        ValueError: An upsert without its feature, or with another one's; the message names the field.
    """
    for edit in edits:
        if edit.action != "upsert":
            continue
        if edit.feature is None:
            raise ValueError(f"edit {edit.event_key}: feature is None, an upsert needs one")
        for name in ("source", "feature_id", "version", "content_hash"):
            said, carried = getattr(edit, name), getattr(edit.feature, name)
            if said != carried:
                raise ValueError(f"edit {edit.event_key}: {name} is {said!r}, its feature's is {carried!r}")


def decide(edits: Sequence[Edit], standing: Mapping[Identity, Standing], applied_keys: set[str]) -> Decided:
    """Decide about a batch; two edits of one feature see each other.

    Args:
        edits: In order.
        standing: What stands for those of their features that have, or had, anything.
        applied_keys: Those of their event keys that were applied before.
    """
    decided = Decided()
    now, keys = dict(standing), set(applied_keys)
    for edit in edits:
        identity = edit.source, edit.feature_id
        stands = now.get(identity)
        outcome = _outcome(edit, stands, edit.event_key in keys)
        if outcome != "version_conflict" and edit.event_key not in keys:
            keys.add(edit.event_key)
            decided.new_keys[edit.event_key] = None
        if outcome == "applied":
            after = edit.feature if edit.action == "upsert" else None
            decided.changes.append(Change(edit, stands[2] if stands else None, after))
            decided.last[identity] = edit
            stands = now[identity] = edit.version, edit.content_hash, after
        decided.applied.append(Applied(edit, outcome, stands[0] if stands else 0))
    return decided


def source_times(edits: Sequence[Edit], decided: Decided, now_ms: int) -> dict[str, SourceTimes]:
    """How current each source is by this batch alone; only those of which something was new.

    Args:
        edits: The batch.
        decided: How it ended.
        now_ms: When it was applied, milliseconds since the epoch, UTC.
    """
    newest: dict[str, int] = {edit.source: 0 for edit in edits if edit.event_key in decided.new_keys}
    for change in decided.changes:
        source = change.edit.source
        newest[source] = max(newest.get(source, 0), change.edit.event_time_ms)
    return {source: SourceTimes(newest[source], now_ms) for source in sorted(newest)}


def _outcome(edit: Edit, stands: Standing | None, key_applied: bool) -> EditOutcome:
    if key_applied:
        return "duplicate"
    if stands is None or edit.version > stands[0]:
        return "applied"
    if edit.version < stands[0]:
        return "stale"
    return "duplicate" if edit.content_hash == stands[1] else "version_conflict"
