"""What is wrong and who was told: regions, news, recoveries, receivers that are away, runs that fail."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.services import alerting
from geo_assets.services.alerting import (
    FORGOTTEN_MS,
    GIVE_UP_MS,
    QUIET_MS,
    REGIONS,
    RETRY_MS,
    RUN_ALERTS,
    Evaluation,
    Links,
    RunEnd,
    State,
)
from geo_assets.tiles.tile import Tile
from resources.alerts.protocol import Alert, Message

LINKS = Links("http://dagster", "http://tiles")
HOME = Tile(14, 9_327, 4_741)
FAR = Tile(14, 4_823, 6_160)


class Told:
    """A state with one channel, and what it was told."""

    def __init__(self, *names: str) -> None:
        self.state, self.number, self.now = State(), 0, 1_000_000
        self.names = names or ("hook",)
        self.messages: list[Message] = []

    def check(self, *failing: Tile, name: str = "tiles/topology", count: int | None = None, **more) -> None:
        self.number += 1
        rows = tuple((tile.path, "is broken") for tile in failing)
        found = Evaluation(
            self.number, name, self.now, not failing and not count, failing=rows, count=count or len(rows), **more
        )
        alerting.judge_checks(self.state, [found], LINKS)

    def run(self, job: str = "build_tiles", error: str = "", **more) -> None:
        self.number += 1
        end = RunEnd(self.number, self.now, f"run{self.number}", job, failed=bool(error), error=error, **more)
        alerting.judge_runs(self.state, [end], LINKS, self.now)

    def tick(self, *, away: tuple[str, ...] = (), later_ms: int = 5_000) -> list[Alert]:
        """Compose and send; the alerts that the first channel took."""
        self.now += later_ms
        alerting.follow_channels(self.state, self.names)
        alerting.judge_runs(self.state, [], LINKS, self.now)
        alerting.compose(self.state, self.now)
        self.state = State.from_json(self.state.to_json())  # As between two ticks.
        took: list[Alert] = []
        for name, message in alerting.due(self.state, self.now):
            if name in away:
                alerting.refused(self.state, name, "it answered 503", 0, self.now)
                continue
            alerting.taken(self.state, name)
            if name == self.names[0]:
                self.messages.append(message)
                took += message.alerts
        return took


def told(alerts: list[Alert]) -> list[tuple[str, str, int]]:
    return [(alert.status, alert.region, alert.count) for alert in alerts]


def test_far_apart_regions_are_alerts_of_their_own_and_each_ends_by_itself() -> None:
    here = Told()
    here.check(HOME, FAR)
    assert told(here.tick()) == [("firing", FAR.quadkey, 1), ("firing", HOME.quadkey, 1)]
    here.check(HOME)
    assert told(here.tick()) == [("resolved", FAR.quadkey, 1)]
    here.check()
    assert told(here.tick()) == [("resolved", HOME.quadkey, 1)]
    assert here.tick() == []
    assert here.state.firing == here.state.over == here.state.channels["hook"].told == {}


def test_what_began_and_ended_between_two_looks_is_told_once_as_over() -> None:
    here = Told()
    here.tick()
    here.check(HOME)
    here.check()
    (alert,) = here.tick()
    assert (alert.status, alert.name, [one.subject for one in alert.failing]) == (
        "resolved",
        "tiles/topology",
        [HOME.key],
    )
    assert here.tick() == []
    assert here.state.over == here.state.channels["hook"].told == {}


def test_more_regions_than_people_can_read_are_one() -> None:
    here = Told()
    here.check(*(Tile(14, 512 * step, 4_741) for step in range(REGIONS + 1)))
    assert told(here.tick()) == [("firing", "0", REGIONS + 1)]
    here.check(Tile(14, 0, 4_741))
    assert told(here.tick()) == [("firing", Tile(14, 0, 4_741).quadkey, 1), ("resolved", "0", REGIONS + 1)]


def test_which_tile_fails_is_news_among_few_and_none_among_many() -> None:
    here = Told()
    tiles = [Tile(14, HOME.x + step, HOME.y) for step in range(64)]
    here.check(tiles[0])
    assert len(here.tick()) == 1
    here.check(tiles[1])
    assert len(here.tick()) == 1
    here.check(*tiles[:20])
    assert len(here.tick()) == 1
    here.check(*tiles[5:25])
    assert here.tick() == []
    here.check(*tiles[:40])
    assert len(here.tick()) == 1


def test_a_severity_that_rises_is_news() -> None:
    here = Told()
    here.check(HOME, severity="warning")
    assert [alert.severity for alert in here.tick()] == ["warning"]
    here.check(HOME)
    (alert,) = here.tick()
    assert (alert.severity, alert.since_ms) == ("error", 1_000_000)


def test_a_table_that_shows_a_part_ends_nothing_that_it_does_not_show() -> None:
    here = Told()
    here.check(HOME, FAR)
    here.tick()
    here.check(HOME, count=5_000)
    assert [alert.region for alert in here.tick()] == [HOME.quadkey]
    assert len(here.state.firing) == 2
    here.check(HOME)
    assert [alert.status for alert in here.tick()] == ["resolved", "firing"] or len(here.state.firing) == 1


def test_a_check_of_numbers_alone_is_told_once_however_the_numbers_move() -> None:
    here = Told()
    for number in range(3):
        here.check(name="tiles/freshness", count=1, summary=f"{number} s behind")
        assert len(here.tick()) == (number == 0)


def test_errors_stand_before_warnings_and_those_before_recoveries() -> None:
    here = Told()
    here.check(HOME, name="tiles/a")
    here.tick()
    here.check(name="tiles/a")
    here.check(HOME, name="tiles/b", severity="warning")
    here.check(HOME, name="tiles/c")
    assert [alert.name for alert in here.tick()] == ["tiles/c", "tiles/b", "tiles/a"]


def test_tries_become_rarer_up_to_a_bound_and_start_with_the_next_tick() -> None:
    here = Told()
    here.check(HOME)
    waits: list[int] = []
    for _ in range(9):
        here.tick(away=("hook",))
        channel = here.state.channels["hook"]
        waits.append(channel.next_ms - here.now)
        here.now = channel.next_ms
    assert waits == [5_000, 10_000, 20_000, 40_000, 80_000, 160_000, 300_000, 300_000, 300_000]
    assert (waits[0], waits[-1]) == RETRY_MS
    assert len(here.tick()) == 1
    assert here.state.channels["hook"].attempts == 0


def test_a_receiver_that_asks_to_be_left_alone_is() -> None:
    here = Told()
    here.check(HOME)
    alerting.follow_channels(here.state, here.names)
    alerting.compose(here.state, here.now)
    alerting.refused(here.state, "hook", "it answered 429", 600, here.now)
    assert here.tick(later_ms=599_000) == []
    assert len(here.tick(later_ms=1_000)) == 1


def test_a_receiver_that_is_away_holds_up_no_other() -> None:
    here = Told("good", "bad")
    here.check(HOME)
    assert len(here.tick(away=("bad",))) == 1
    here.check(FAR, name="tiles/crs")
    assert len(here.tick(away=("bad",))) == 1
    assert here.state.channels["bad"].sending is not None


def test_what_began_and_ended_while_a_receiver_was_away_is_told_all_the_same() -> None:
    here = Told()
    here.check(HOME, name="tiles/a")
    here.tick(away=("hook",))
    here.check(FAR, name="tiles/b")
    here.tick(away=("hook",))
    here.check(name="tiles/b", summary="all is well")

    first, second = here.tick(later_ms=60_000), here.tick()

    assert [(alert.name, alert.status) for alert in first] == [("tiles/a", "firing")]
    assert [(a.name, a.status, a.summary) for a in second] == [("tiles/b", "resolved", "all is well")]
    assert here.tick() == []


def test_a_message_that_gets_too_old_is_made_anew_of_what_stands_then() -> None:
    here = Told()
    here.check(HOME, name="tiles/a")
    here.tick(away=("hook",))
    here.check(HOME, name="tiles/b")
    took = here.tick(later_ms=GIVE_UP_MS)
    assert {alert.name for alert in took} == {"tiles/a", "tiles/b"}
    assert here.state.channels["hook"].given_up == 1


def test_a_new_receiver_is_told_what_stands_and_one_that_is_gone_is_forgotten() -> None:
    here = Told("one")
    here.check(HOME)
    here.tick()
    here.names = ("two",)
    assert len(here.tick()) == 1
    assert set(here.state.channels) == {"two"}


def test_runs_that_die_of_one_cause_are_one_alert_whatever_numbers_it_names() -> None:
    here = Told()
    for number in range(5):
        here.run(error=f"tile 14:0{number}: object {number:064x} is gone", batch=f"b{number}")
    (alert,) = here.tick()
    assert (alert.count, alert.severity, len(alert.failing)) == (5, "warning", 5)
    here.run(error="tile 14:09: object ff00ff00ff is gone", batch="b9")
    assert here.tick() == []


def test_a_success_ends_a_job_s_alert_only_when_nothing_has_failed_for_a_while() -> None:
    here = Told()
    here.run(error="boom")
    here.tick()
    here.run()
    assert here.tick() == []
    here.run(error="boom")
    assert here.tick(later_ms=QUIET_MS) == [], "none succeeded since"
    here.run()
    (alert,) = here.tick()
    assert (alert.status, alert.summary) == ("resolved", "runs succeed again; 2 runs failed so")


def test_a_job_that_nobody_starts_again_is_forgotten_after_a_day() -> None:
    here = Told()
    here.run("repair_coverage", error="boom")
    here.tick()
    (alert,) = here.tick(later_ms=FORGOTTEN_MS)
    assert alert.status == "resolved"


def test_a_hundred_causes_are_bounded() -> None:
    here = Told()
    for number in range(100):
        here.run(error=f"cause {chr(97 + number // 26)}{chr(97 + number % 26)}")
    alerts = here.tick()
    assert len(alerts) == RUN_ALERTS + 1
    assert sum(alert.count for alert in alerts) == 100


def test_a_run_that_was_counted_is_not_counted_again() -> None:
    here = Told()
    end = RunEnd(7, 1_000_000, "r", "audit", failed=True, error="boom")
    for _ in range(3):
        alerting.judge_runs(here.state, [end], LINKS, here.now)
    assert [alert.count for alert in here.tick()] == [1]


def test_no_line_shows_the_password_of_an_address() -> None:
    assert alerting.line("no\n route to redis://:pass@host:1/0 ") == "no route to redis://host:1/0"
    assert len(alerting.line("x" * 1_000)) == alerting.TEXT


def test_a_state_of_another_release_begins_anew() -> None:
    assert State.from_json('{"positions": 7}') == State()
    assert State.from_json(None) == State()


STEP = st.one_of(
    st.tuples(st.just("check"), st.sampled_from("ab"), st.sets(st.sampled_from([HOME, FAR]), max_size=2)),
    st.tuples(st.just("tick"), st.booleans(), st.booleans()),
)


@given(st.lists(STEP, max_size=40))
@settings(max_examples=60, deadline=None)
def test_a_receiver_that_drops_what_it_had_always_ends_up_knowing_what_stands(steps: list) -> None:
    """Whatever fails and recovers while it is away, and however often an answer is lost on the way back."""
    here = Told()
    seen: dict[str, None] = {}
    knows: dict[str, str] = {}
    history: dict[str, list[str]] = {}

    def receive(message: Message) -> None:
        if message.id in seen:
            return
        seen[message.id] = None
        for alert in message.alerts:
            history.setdefault(alert.key, []).append(alert.status)
            if alert.status == "firing":
                knows[alert.key] = alert.severity
            else:
                knows.pop(alert.key, None)

    def tick(*, arrives: bool = True, answered: bool = True) -> None:
        here.now += 400_000
        alerting.follow_channels(here.state, here.names)
        alerting.compose(here.state, here.now)
        for name, message in alerting.due(here.state, here.now):
            if arrives:
                receive(message)
            if arrives and answered:
                alerting.taken(here.state, name)
            else:
                alerting.refused(here.state, name, "away", 0, here.now)

    for kind, first, second in steps:
        if kind == "check":
            here.check(*sorted(second, key=str), name=f"tiles/{first}")
        else:
            tick(arrives=first, answered=second)
    tick()
    tick()
    assert knows == {key: condition.alert.severity for key, condition in here.state.firing.items()}
    before = len(seen)
    tick()
    assert len(seen) == before, "nothing is told twice"
