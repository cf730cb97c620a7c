"""`geo-assets simulate` against a running edge and a real log: what it sends, counts, watches and says."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from geo_assets.cli.answers import CliError
from geo_assets.cli.simulate import one_line, rate_of, summary, table
from geo_assets.cli.up import simulate_command
from geo_assets.events import topics
from geo_assets.flow.epochs import epoch_of_mark
from geo_assets.geofence.triggers import NAMES, decode
from geo_assets.services import routing
from geo_assets.services.edge import create_app
from geo_assets.services.sample import folder, send_fences
from geo_assets.services.simulate import sending
from geo_assets.services.simulate.edits import MARK
from geo_assets.services.simulate.run import Options, Simulation
from geo_assets.services.simulate.sending import LogSender
from geo_assets.services.simulate.tally import SimulationError, Tally
from geo_assets.simulation.fleet import Fleet
from geo_assets.simulation.routes import read_routes
from geo_assets_tests.resources.contract_event_log import read_all
from geo_assets_tests.services.running import running
from geo_assets_tests.test_cli import Terminal
from geo_assets_tests.waiting import patient
from geo_assets_tests.world import World, feature
from resources.event_log.protocol import Done, LogUnavailable, Publisher, Record

ODD: dict[str, Any] = {"late": 0.05, "duplicates": 0.05, "jumps": 0.05}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "home")
    yield made
    made.close()


@pytest.fixture
def url(world: World) -> Iterator[str]:
    stack = world.stack
    app = create_app(stack.log, stack.guard, stack.tiles, stack.sources, world.settings)
    with running(app) as base:
        yield base


@pytest.fixture
def terminal(world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(world.settings.home, monkeypatch, capsys)


def simulated(world: World, **options: Any) -> dict[str, Any]:
    source = next(iter(world.stack.sources.values()))
    return Simulation(world.stack, source, Options(**options)).run(threading.Event())


def positions(world: World) -> list[dict[str, Any]]:
    return [json.loads(record.value or b"") for record in read_all(world.stack.log, topics.POSITIONS)]


def mark(record: Record) -> bool:
    """Whether it says where an epoch begins, and is no trigger."""
    return epoch_of_mark(record.value or b"") is not None


def short(**more: Any) -> dict[str, Any]:
    """Fifty devices for three seconds."""
    return {"devices": 50, "rate_s": 2.0, "minutes": 0.05, **more}


@pytest.mark.parametrize("via", ["edge", "log"])
def test_what_is_made_is_in_the_log_and_counted(world: World, url: str, via: str) -> None:
    report = simulated(world, **short(via=via, url=url, **ODD))
    stored = positions(world)

    assert report["made"] == report["sent"] == len(stored) > 200
    assert (report["waiting"], report["refused"], report["shed"], report["problem"]) == (0, 0, 0, None)
    assert set(report["fates"]) == {"plain", "late", "duplicate", "jump"}
    assert Counter(p["lat"] > 61 for p in stored)[True] == report["fates"]["jump"]
    newest: dict[str, int] = {}
    behind = 0
    for said in stored:
        behind += said["event_time_ms"] <= newest.get(said["device_id"], 0)
        newest[said["device_id"]] = max(said["event_time_ms"], newest.get(said["device_id"], 0))
    # In the log's order of each device: nothing was overtaken but what was meant to be.
    assert behind == report["fates"]["late"] + report["fates"]["duplicate"]
    assert set(report["answers"]) == ({"202"} if via == "edge" else set())
    assert 2.5 < report["seconds"] < patient(12)


def test_the_same_seed_sends_the_same_devices_the_same_way(world: World, url: str) -> None:
    source = next(iter(world.stack.sources.values()))
    began = time.time()
    made = [Simulation(world.stack, source, Options(url=url), clock=lambda: began).fleet for _ in range(2)]
    first = int(began * 1_000)
    one, other = (fleet.between(first, first + 5_000) for fleet in made)
    assert one.lon.tolist() == other.lon.tolist()


def test_sped_up_it_ends_at_the_present(world: World) -> None:
    before = time.time() * 1_000
    report = simulated(world, devices=20, minutes=1.0, speed_up=30, via="log")
    times = [p["event_time_ms"] for p in positions(world)]
    assert 1.9 <= report["seconds"] < patient(8)
    assert before - 60_000 <= min(times) < before - 50_000
    assert max(times) <= time.time() * 1_000
    assert report["asked_s"] == 600


def test_it_sees_the_triggers_of_its_devices_and_times_them(world: World) -> None:
    send_fences(world.stack)
    stop = threading.Event()
    options = replace(routing.options_of(world.settings), idle_s=None, run_s=None)
    runner = threading.Thread(target=lambda: routing.route(world.stack, options, stop=stop))
    runner.start()
    try:
        report = simulated(world, devices=200, minutes=0.07, via="log", watch=True, prefix="a-")
        again = simulated(world, devices=1, minutes=0.01, rate_s=1.0, via="log", watch=True, prefix="b-")
    finally:
        stop.set()
        runner.join(patient(30))
    told = [decode(record.value or b"") for record in read_all(world.stack.log, topics.TRIGGERS) if not mark(record)]
    assert report["triggers"]["ENTER"] > 0
    assert 0 < report["trigger_ms"]["p50"] <= report["trigger_ms"]["p99"]
    # What others' devices do is not counted; how many cross a border depends on when they set out.
    for prefix, counted in ("a-", report["triggers"]), ("b-", again["triggers"]):
        assert Counter(counted) <= Counter(NAMES[each.state] for each in told if each.device_id.startswith(prefix))


def test_a_body_that_the_edge_cannot_take_now_goes_again_and_none_is_lost(world: World) -> None:
    stack = world.stack
    refused: list[str] = []

    class Unwilling:
        """The log, away for the first appends."""

        def __getattr__(self, name: str) -> Any:
            return getattr(stack.log, name)

        def append(self, records: Any) -> Any:
            if len(refused) < 3:
                refused.append("no")
                raise LogUnavailable("away")
            return stack.log.append(records)

    unwilling: Any = Unwilling()
    app = create_app(unwilling, stack.guard, stack.tiles, stack.sources, world.settings)
    with running(app) as base:
        report = simulated(world, **short(url=base))
    assert report["answers"]["503"] in (3, 4)  # Two bodies may have shared an append.
    assert report["made"] == report["sent"] == len(positions(world))


def test_a_broken_publisher_costs_nothing_and_keeps_the_order(world: World) -> None:
    log = world.stack.log

    class Breaking:
        """A publisher that fails the second sending, as one does whose broker went away."""

        def __init__(self) -> None:
            self.inner, self.sendings = log.publisher(topics.POSITIONS), 0
            self.broken: LogUnavailable | None = None
            self.held: list[Any] = []

        @property
        def under_way(self) -> int:
            return self.inner.under_way + sum(len(keys) for keys, _ in self.held)

        def send(self, keys: Any, values: Any, done: Done) -> None:
            self.sendings += 1
            if self.sendings == 1:
                self.inner.send(keys, values, done)
            else:
                self.held.append((keys, done))
                self.broken = LogUnavailable("away")

        def serve(self, timeout_s: float = 0.0) -> None:
            self.inner.serve(timeout_s)

        def close(self) -> None:
            self.inner.flush(5.0)
            self.inner.close()
            for keys, done in self.held:
                done({place: LogUnavailable("away") for place in range(len(keys))}, [])
            self.held.clear()

    made: list[Any] = []

    class Log:
        def publisher(self, topic: str) -> Publisher:
            made.append(Breaking() if len(made) < 2 else log.publisher(topic))
            return made[-1]

    tally = Tally()
    fleet = Fleet(read_routes((folder() / "routes.json").read_bytes()), 30, start_ms=1_770_000_000_000)
    sender = LogSender(Log(), tally)  # pyright: ignore[reportArgumentType]
    total = 0
    for second in range(6):
        sent = fleet.between(1_770_000_000_000 + second * 1_000, 1_770_000_001_000 + second * 1_000)
        total += len(sent)
        sender.send(sent, fleet.ids)
        time.sleep(0.2)
    sender.close(patient(30))

    assert (sender.waiting, tally.count("sent"), len(made)) == (0, total, 3)
    by_device: dict[str, list[int]] = {}
    for said in positions(world):
        by_device.setdefault(said["device_id"], []).append(said["event_time_ms"])
    assert sum(map(len, by_device.values())) == total
    assert all(times == sorted(set(times)) for times in by_device.values())


def test_rule_9_what_waits_is_bounded_and_what_is_above_it_is_shed_and_counted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "MAX_WAITING", 100)
    stuck = threading.Event()
    freed = threading.Timer(3.0, stuck.set)
    stack = world.stack

    class Stuck:
        def __getattr__(self, name: str) -> Any:
            return getattr(stack.log, name)

        def append(self, records: Any) -> Any:
            # Three seconds from the first of them, however long it took to begin.
            with suppress(RuntimeError):
                freed.start()
            stuck.wait(patient(30))
            return stack.log.append(records)

    slow: Any = Stuck()
    app = create_app(slow, stack.guard, stack.tiles, stack.sources, world.settings)
    with running(app) as base:
        report = simulated(world, **short(url=base, devices=200))
    assert report["shed"] > 500
    assert report["made"] == report["sent"] + report["shed"]
    assert report["waiting"] == 0


def test_edits_move_buildings_and_in_the_end_all_are_where_they_were(world: World, url: str) -> None:
    lon, lat = 24.9441, 60.1690
    for number in range(1, 4):
        world.edit(feature(number, at=(lon + number * 0.0008, lat)))
    before = {f.feature_id: f.geometry for f in world.stack.features.scan(source="city")}

    report = simulated(world, **short(url=url, edits_s=5.0))

    edits = report["edits"]
    assert edits["due"] == edits["taken"] >= 12
    posted = [json.loads(r.value or b"") for r in read_all(world.stack.log, topics.RAW)][-edits["taken"] :]
    assert {each["id"] for each in posted} == {1, 2, 3}
    assert any(each["properties"].get(MARK) for each in posted)
    world.ingest.work(read_all(world.stack.log, topics.RAW))
    after = {f.feature_id: f for f in world.stack.features.scan(source="city")}
    for name, found in after.items():
        assert found.geometry == before[name]
        assert found.version > 1
        assert MARK not in found.properties


def test_edits_of_a_home_without_the_sample_say_what_is_missing(world: World, url: str) -> None:
    with pytest.raises(SimulationError, match="no buildings in central Helsinki to move"):
        simulated(world, **short(url=url, edits_s=1.0))


def test_a_source_whose_signature_the_edge_does_not_accept_ends_it_with_one_line(world: World, url: str) -> None:
    source = replace(next(iter(world.stack.sources.values())), secrets=("whsec_" + "QUFB" * 8,))
    with pytest.raises(SimulationError, match="the edge refuses the source city: 401"):
        Simulation(world.stack, source, Options(**short(url=url))).run(threading.Event())


def test_the_command_sends_and_sums_up(terminal: Terminal, url: str) -> None:
    done = terminal("simulate", "--url", url, "--devices", "20", "--rate", "4/s", "--minutes", "0.03", "--every", "0.5")
    assert done.code == 0, done.err
    assert "devices       20" in done.out
    assert "x 202" in done.out
    assert "80/s asked" in done.out
    assert "backlog" in done.err

    done = terminal("simulate", "--via", "log", "--minutes", "0.02", "--json", "--watch")
    report = json.loads(done.out)
    assert report["sent"] == report["made"] > 100
    assert report["fates"] == {"plain": report["made"]}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--url", "http://127.0.0.1:9"), "start it with `geo-assets up --sample`"),
        (("--rate", "fast"), "--rate 'fast' is no rate"),
        (("--rate", "0/s"), "is no rate above zero"),
        (("--rate", "99999999999/s"), "--rate '99999999999/s' is outside 0.5/min to 100/s"),
        (("--rate", "9" * 400), "is outside 0.5/min to 100/s"),
        (("--rate", "1/h"), "--rate '1/h' is outside 0.5/min to 100/s"),
        (("--edits", "1e9"), "--edits '1e9' is no rate"),
        (("--edits", "100000/s"), "--edits '100000/s' is outside 1/h to 1000/s"),
        (("--minutes", "inf"), "--minutes inf is outside 0 to 527,040"),
        (("--minutes", "1e300"), "--minutes 1e+300 is outside"),
        (("--via", "pigeon"), "none of edge, log"),
        (("--prefix", 'a"'), "prefix"),
        (("--via", "log", "--minutes", "0", "--speed-up", "5"), "ends at the present"),
        (("--via", "log", "--late", "0.3", "--jumps", "0.3"), "late + duplicates + jumps: 0.6"),
        (("--via", "log", "--source", "nobody"), "nobody"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(terminal: Terminal, arguments: tuple[str, ...], says: str) -> None:
    assert says in terminal.refused("simulate", *arguments)


def test_rates_are_read_with_their_unit() -> None:
    assert [rate_of(text, "--rate", "1/h", "9/s") for text in ("5/s", "30/min", "7200/h", "0.5")] == [5, 0.5, 2, 0.5]
    with pytest.raises(CliError):
        rate_of("5/day", "--rate", "1/h", "9/s")


def test_a_terminal_shows_what_a_line_says() -> None:
    report: dict[str, Any] = {
        "devices": 5, "watched": True, "seconds": 2.0, "asked_s": 5.0, "achieved_s": 4.0, "waiting": 3,
        "behind_s": 0.5, "made": 11, "fates": {"plain": 10, "late": 1}, "sent": 8, "refused": 1, "shed": 2,
        "answers": {"202": 7, "503": 1},
        "acknowledged_ms": {"p50": 5.0, "p95": 6.0, "p99": 7.0, "max": 8.0}, "edits": {}, "triggers": {},
        "trigger_ms": None, "trigger_ms_last_minute": None, "problem": "503 unavailable",
    }  # fmt: skip
    for part in ("8 of 11", "4/s of 5/s", "1 late", "7 x 202, 1 x 503", "1 refused, 2 shed", "p99 7 ms", "none yet"):
        assert part in one_line(report)
    assert len(summary(report)) == table(report).row_count


def test_up_starts_it_for_as_long_as_it_runs_itself() -> None:
    assert simulate_command(["geo-assets"], 300)[:4] == ["geo-assets", "simulate", "--devices", "300"]
    assert "--minutes 0" in " ".join(simulate_command(["geo-assets"], 300))
