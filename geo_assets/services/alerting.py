"""What is wrong, and who has been told of it: pure functions from what Dagster stored to the messages that are owed.

Level triggered: a channel is told until what it was told is what stands. No I/O, no Dagster: sensors/check_alerts.py
reads and sends. What is kept between two ticks is `State`, one value of the ledger.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from geo_assets.links import check_url, map_url, run_url
from geo_assets.tiles.tile import Tile, TileError, common_prefix
from resources.alerts.protocol import Alert, Failing, Message, Severity

VALUE = "alerts"
"""The ledger's named value that keeps the state."""

REGION_ZOOM = 5
"""Failing tiles below one tile of this zoom, 1,250 km wide at the equator, are one alert: a country, not a planet."""

REGIONS = 8
"""Alerts of one check; where more regions fail, all of them are one."""

EXACT = 10
"""So many failing partitions are compared by name; more of them by number, which has to double to be news: an audit
looks at other tiles each time, and one fault everywhere is not news every hour."""

SHOWN = 5
"""Partitions that an alert names."""

TEXT = 300
"""Characters of a summary, and of a problem."""

RUN_ALERTS = 20
"""Causes of failing runs told apart; those of one job beyond are one."""

QUIET_MS = 600_000
"""How long no run may have failed, and one must have succeeded since, until it is over: tiles that kill their run are
asked for in halves, of which some succeed, and that is one story."""

FORGOTTEN_MS = 24 * 3_600_000
"""After so long without another failure a job that nobody starts again is no news."""

RETRY_MS = (5_000, 300_000)
"""Between two tries: twice as long each time, between these. The first is the next tick."""

GIVE_UP_MS = 24 * 3_600_000
"""How old a message may be: then what stands is said anew, in another one."""

OWED = 200
"""Conditions that a channel is kept a record of; those found first go first."""


# -- what was read -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One result of a check.

    Args:
        id: Its number in Dagster's event log: what is newer has a higher one.
        check: `asset/check`.
        at_ms: When, milliseconds since the epoch, UTC.
        passed: Whether.
        severity: What a failure of it is.
        summary: Its description.
        failing: Rows of its table: subject and problem.
        count: How much fails; there may be fewer rows.
    """

    id: int
    check: str
    at_ms: int
    passed: bool
    severity: Severity = "error"
    summary: str = ""
    failing: tuple[tuple[str, str], ...] = ()
    count: int = 0


@dataclass(frozen=True, slots=True)
class RunEnd:
    """A run that failed or succeeded.

    Args:
        id: Number of the event in Dagster's event log.
        at_ms: When, milliseconds since the epoch, UTC.
        run_id: Which.
        job: Of which job.
        failed: Or succeeded.
        error: First line of what it died of.
        batch: Batch of tiles, where it had one: the dirty mark asks for those again.
        partition: Partition, where it had one.
        region: Quadkey prefix of its batch.
    """

    id: int
    at_ms: int
    run_id: str
    job: str
    failed: bool
    error: str = ""
    batch: str = ""
    partition: str = ""
    region: str = ""


# -- what is kept --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Condition:
    """Something that is wrong now.

    Args:
        alert: How it is told.
        digest: Of what makes it news.
        ok_ms: When a run of the job succeeded after the last failure; 0: none did.
    """

    alert: Alert
    digest: str
    ok_ms: int = 0


@dataclass(slots=True)
class Channel:
    """What one channel knows, and what is on its way to it."""

    told: dict[str, Condition] = field(default_factory=dict[str, Condition])
    """By key: as the channel was told. An empty digest: it was over before anybody could be told."""
    sending: Message | None = None
    """Not taken yet: it is sent, under its id, until it is or until it is too old."""
    digests: dict[str, str] = field(default_factory=dict[str, str])
    """Of the alerts of that message."""
    attempts: int = 0
    next_ms: int = 0
    problem: str = ""
    """Why the last try failed."""
    given_up: int = 0
    """Messages that got too old."""


@dataclass(slots=True)
class State:
    """Everything that is kept between two ticks."""

    positions: dict[str, int] = field(default_factory=dict[str, int])
    """Kind of event -> id up to which all of them were read."""
    ahead: int = 0
    """Newest id of a while ago: positions follow it when nothing below it can still be on its way."""
    ahead_ms: int = 0
    checks: dict[str, int] = field(default_factory=dict[str, int])
    """Check -> id of its newest evaluation."""
    runs: list[int] = field(default_factory=list[int])
    """Ids of runs' ends above the positions that were counted."""
    firing: dict[str, Condition] = field(default_factory=dict[str, Condition])
    over: dict[str, Alert] = field(default_factory=dict[str, Alert])
    """By key: how it ended, until every channel knows."""
    channels: dict[str, Channel] = field(default_factory=dict[str, Channel])

    def to_json(self) -> str:
        """As text, keys in order: the same state is the same text."""
        return msgspec.json.encode(self, order="deterministic").decode()

    @classmethod
    def from_json(cls, text: str | None) -> State:
        """From text; None, or a text of another release that cannot be read, begins anew."""
        if text is None:
            return cls()
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError:
            return cls()


@dataclass(frozen=True, slots=True)
class Links:
    """Where people find what an alert is about."""

    dagster_url: str
    tiles_url: str


# -- checks --------------------------------------------------------------------------------------------------------


def line(text: str, most: int = TEXT) -> str:
    """One line without the user and password of an address."""
    text = _SECRET.sub("://", " ".join(text.split()))
    return text if len(text) <= most else f"{text[: most - 1]}…"


_SECRET = re.compile(r"://[^/\s@]*@")


def _tile(subject: str) -> Tile | None:
    try:
        return Tile.from_path(subject) if "/" in subject else Tile.from_key(subject)
    except TileError:
        return None


def conditions_of(found: Evaluation, links: Links) -> dict[str, Condition]:
    """The conditions of a failed check, one for each region that fails.

    Args:
        found: The evaluation.
        links: For the map and the UI.
    """
    groups: dict[str, list[tuple[str, str, Tile | None]]] = defaultdict(list)
    for subject, problem in found.failing:
        tile = _tile(subject)
        groups["" if tile is None else tile.quadkey[:REGION_ZOOM]].append((subject, problem, tile))
    if len(groups) > REGIONS:
        groups = {"": [each for name in sorted(groups) for each in groups[name]]}
    asset, _, name = found.check.rpartition("/")
    url = check_url(links.dagster_url, asset, name)
    shown = len(found.failing)
    made: dict[str, Condition] = {}
    for bucket, members in sorted((groups or {"": []}).items()):
        subjects = sorted({tile.key if tile else subject for subject, _, tile in members})
        tiles = [tile for _, _, tile in members if tile is not None]
        region = common_prefix([tile.quadkey for tile in tiles])
        # What the table leaves out is somewhere; where there is one region only, it is there.
        count = found.count if len(groups) < 2 else len(members)
        size = ",".join(subjects) if count <= EXACT and shown >= found.count else f"{region}~{count.bit_length()}"
        alert = Alert(
            key=f"check:{found.check}:{bucket}" if bucket else f"check:{found.check}",
            status="firing",
            severity=found.severity,
            kind="check",
            name=found.check,
            summary=line(found.summary),
            region=region,
            count=count,
            failing=tuple(_failing(*member, links) for member in members[:SHOWN]),
            url=url,
            map_url=map_url(links.tiles_url, Tile.from_quadkey(region)) if tiles else "",
            since_ms=found.at_ms,
            at_ms=found.at_ms,
        )
        made[alert.key] = Condition(alert, _digest(found.severity, bucket, size))
    return made


def _failing(subject: str, problem: str, tile: Tile | None, links: Links) -> Failing:
    if tile is None:
        return Failing(line(subject, 80), line(problem))
    return Failing(tile.key, line(problem), map_url(links.tiles_url, tile))


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def judge_checks(state: State, evaluations: Iterable[Evaluation], links: Links) -> None:
    """Take in evaluations, oldest first: the newest of a check says what stands, and what failed in between is told."""
    for found in sorted(evaluations, key=lambda one: one.id):
        check = found.check
        if found.id <= state.checks.get(check, -1):
            continue
        state.checks[check] = found.id
        mine = {key for key, each in state.firing.items() if each.alert.kind == "check" and each.alert.name == check}
        stands = {} if found.passed else conditions_of(found, links)
        for key, condition in stands.items():
            if (before := state.firing.get(key)) is not None:
                condition = replace(condition, alert=replace(condition.alert, since_ms=before.alert.since_ms))
            _fire(state, key, condition)
        # A table that shows a part says nothing of the regions that are not in it.
        whole = found.passed or len(found.failing) >= found.count
        for key in mine - set(stands) if whole else ():
            # Regions that became too many are one alert from then on, and that one may become several again.
            moved = f"check:{check}" in (key, *stands) and not found.passed
            summary = "goes on under other regions" if moved else "nothing fails here any more"
            summary = line(found.summary) if found.passed else summary
            _end(state, key, summary, found.at_ms)


def drop_checks(state: State, known: Collection[str], now_ms: int) -> None:
    """End what was wrong with checks that do not exist any more: nobody will ever call them green."""
    for key, condition in list(state.firing.items()):
        if condition.alert.kind == "check" and condition.alert.name not in known:
            _end(state, key, "this check does not exist any more", now_ms)
    for check in set(state.checks) - set(known):
        del state.checks[check]


# -- runs ----------------------------------------------------------------------------------------------------------

_NUMBERS = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+", re.IGNORECASE)


def judge_runs(state: State, ends: Iterable[RunEnd], links: Links, now_ms: int) -> None:
    """Take in runs that ended. Those of one job that fail for one cause are one condition, however many."""
    for end in sorted(ends, key=lambda one: one.id):
        if end.id in state.runs:
            continue
        state.runs.append(end.id)
        if end.failed:
            _failed(state, end, links)
            continue
        for key, condition in state.firing.items():
            if condition.alert.kind == "run" and condition.alert.name == end.job and not condition.ok_ms:
                state.firing[key] = replace(condition, ok_ms=end.at_ms)
    for key, condition in list(state.firing.items()):
        if condition.alert.kind != "run":
            continue
        quiet_ms = now_ms - condition.alert.at_ms
        if (condition.ok_ms and quiet_ms >= QUIET_MS) or quiet_ms >= FORGOTTEN_MS:
            times = f"{condition.alert.count:,} run{'' if condition.alert.count == 1 else 's'} failed so"
            why = "runs succeed again" if condition.ok_ms else "none failed for a day"
            _end(state, key, f"{why}; {times}", now_ms)


def _failed(state: State, end: RunEnd, links: Links) -> None:
    error = line(end.error) or "it ended without a word: killed, evicted or out of memory"
    # Numbers, ids and keys differ between runs that die of the same.
    key = f"run:{end.job}:{_digest(_NUMBERS.sub('#', error))[:8]}"
    if key not in state.firing and sum(each.alert.kind == "run" for each in state.firing.values()) >= RUN_ALERTS:
        key = f"run:{end.job}:other"
    before = state.firing.get(key)
    # Tiles of a batch are asked for again by their marks: one failure is no reason to wake anybody.
    severity: Severity = "warning" if end.batch and before is None else "error"
    if before is not None:
        severity = before.alert.severity
    what = f"batch {end.batch}" if end.batch else f"partition {end.partition}" if end.partition else ""
    newest = Failing(f"run {end.run_id[:8]}", what, run_url(links.dagster_url, end.run_id))
    region = end.region if end.region.isdigit() else ""
    alert = Alert(
        key=key,
        status="firing",
        severity=severity,
        kind="run",
        name=end.job,
        summary=error,
        region=region if before is None else common_prefix([region, before.alert.region]),
        count=1 if before is None else before.alert.count + 1,
        failing=(newest, *(before.alert.failing if before else ()))[:SHOWN],
        url=run_url(links.dagster_url, end.run_id),
        since_ms=end.at_ms if before is None else before.alert.since_ms,
        at_ms=end.at_ms,
    )
    if alert.region:
        alert = replace(alert, map_url=map_url(links.tiles_url, Tile.from_quadkey(alert.region)))
    _fire(state, key, Condition(alert, _digest(severity)))


# -- who is told ---------------------------------------------------------------------------------------------------


def _fire(state: State, key: str, condition: Condition) -> None:
    state.firing[key] = condition
    state.over.pop(key, None)


def _end(state: State, key: str, summary: str, at_ms: int) -> None:
    condition = state.firing.pop(key)
    state.over[key] = replace(condition.alert, status="resolved", summary=summary, at_ms=at_ms)
    for channel in state.channels.values():
        if key not in channel.told and key not in channel.digests and len(channel.told) < OWED:
            # It began and ended between two looks, or while the channel took nothing: it is told of all the same.
            channel.told[key] = replace(condition, digest="")


def follow_channels(state: State, names: Sequence[str]) -> None:
    """Keep a record of these channels and of no other."""
    state.channels = {name: state.channels.get(name) or Channel() for name in names}
    known = {key for channel in state.channels.values() for key in (*channel.told, *channel.digests)}
    state.over = {key: alert for key, alert in state.over.items() if key in known}


def compose(state: State, now_ms: int) -> None:
    """Make the message that each channel is owed, where none is on its way to it."""
    for channel in state.channels.values():
        if channel.sending is not None:
            if now_ms - channel.sending.at_ms < GIVE_UP_MS:
                continue
            channel.sending, channel.digests = None, {}
            channel.given_up += 1
        alerts, digests = _owed(state, channel, now_ms)
        if alerts:
            names = [f"{a.key}|{a.status}|{digests[a.key]}|{a.since_ms}|{a.at_ms}" for a in alerts]
            message_id = f"alert_{hashlib.sha256(chr(10).join(names).encode()).hexdigest()[:24]}"
            channel.sending, channel.digests = Message(message_id, now_ms, tuple(alerts)), digests


def _owed(state: State, channel: Channel, now_ms: int) -> tuple[list[Alert], dict[str, str]]:
    digests: dict[str, str] = {}
    alerts: list[Alert] = []
    for key, condition in state.firing.items():
        told = channel.told.get(key)
        if (told is None or told.digest != condition.digest) and (told or len(channel.told) + len(alerts) < OWED):
            alerts.append(condition.alert)
            digests[key] = condition.digest
    for key, told in channel.told.items():
        if key not in state.firing:
            ended = state.over.get(key) or replace(told.alert, status="resolved", at_ms=now_ms)
            alerts.append(replace(ended, since_ms=told.alert.since_ms))
            digests[key] = ""
    # What should wake somebody stands first.
    alerts.sort(key=lambda a: (a.status == "resolved", a.severity != "error", a.key))
    return alerts, digests


def due(state: State, now_ms: int) -> list[tuple[str, Message]]:
    """Messages to send now, the channel that waited longest first."""
    ready = [(name, one) for name, one in state.channels.items() if one.sending and one.next_ms <= now_ms]
    return [(name, one.sending) for name, one in sorted(ready, key=lambda each: each[1].next_ms) if one.sending]


def taken(state: State, name: str) -> None:
    """A channel took its message: it knows what that says."""
    channel = state.channels[name]
    assert channel.sending is not None
    for alert in channel.sending.alerts:
        if alert.status == "resolved":
            channel.told.pop(alert.key, None)
        else:
            channel.told[alert.key] = Condition(alert, channel.digests[alert.key])
    channel.sending, channel.digests, channel.attempts, channel.next_ms, channel.problem = None, {}, 0, 0, ""


def refused(state: State, name: str, problem: str, retry_after_s: float, now_ms: int) -> None:
    """A channel did not take its message: it is sent again, ever less often."""
    channel = state.channels[name]
    channel.attempts += 1
    least, most = RETRY_MS
    wait_ms = min(most, least * 2 ** min(channel.attempts - 1, 16))
    channel.next_ms = now_ms + max(wait_ms, int(retry_after_s * 1000))
    channel.problem = line(problem)


def summary_of(state: State) -> Mapping[str, int]:
    """How it stands, for metrics and for a tick's reason."""
    return {
        "firing": len(state.firing),
        "channels": len(state.channels),
        "undelivered": sum(one.sending is not None for one in state.channels.values()),
        "given_up": sum(one.given_up for one in state.channels.values()),
    }
