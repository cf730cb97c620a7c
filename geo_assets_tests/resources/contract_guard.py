"""What every guard must do, adapter by adapter: subclass `GuardContract` and give it a `harness` fixture."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from geo_assets_tests.resources.guard_processes import (
    acquire_when_told,
    die_holding_a_lease,
    set_when_told,
)
from geo_assets_tests.waiting import patient
from resources.guard.protocol import Guard, Lease

spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class GuardHarness:
    """How the suite gets at an adapter."""

    open: Callable[[], Guard]
    """Opens it on the time that `advance` moves."""
    open_elsewhere: Callable[[], Guard]
    """Pickled: opens the same guard in another process, on real time."""
    advance: Callable[[float], None]
    """Lets so many seconds pass, by a clock of its own or by sleeping."""
    tick_s: float
    """A time to live that is long enough to act in and short enough to wait for."""


class GuardContract:
    """The promises of resources/guard/protocol.py, one test each."""

    @pytest.fixture
    def harness(self) -> GuardHarness:
        raise AssertionError("a subclass names its adapter")

    @pytest.fixture
    def guard(self, harness: GuardHarness) -> Iterator[Guard]:
        guard = harness.open()
        yield guard
        guard.close()

    @pytest.fixture
    def name(self) -> str:
        return f"name-{uuid.uuid4().hex[:8]}"

    def test_it_is_a_guard(self, guard: Guard) -> None:
        assert isinstance(guard, Guard)

    # Keys

    def test_the_first_sets_and_the_next_is_told_what_is_there(self, guard: Guard, name: str) -> None:
        assert guard.set_if_absent(name, "first", 60) is None
        assert guard.set_if_absent(name, "second", 60) == "first"
        assert guard.get(name) == "first"

    def test_an_empty_value_is_a_value(self, guard: Guard, name: str) -> None:
        assert guard.set_if_absent(name, "", 60) is None
        assert guard.set_if_absent(name, "x", 60) == ""

    def test_keys_and_values_are_text_of_any_kind(self, guard: Guard, name: str) -> None:
        key, value = f"{name} ü 漢字 🗺 ' \" \n", "ü 漢字 🗺 ' \" \n"
        assert guard.set_if_absent(key, value, 60) is None
        assert guard.get(key) == value
        assert guard.get(name) is None

    def test_a_key_that_expired_is_absent(self, harness: GuardHarness, guard: Guard, name: str) -> None:
        guard.set_if_absent(name, "first", harness.tick_s)
        harness.advance(harness.tick_s * 1.1)
        assert guard.get(name) is None
        assert guard.set_if_absent(name, "second", 60) is None
        assert guard.get(name) == "second"

    def test_seeing_a_key_does_not_prolong_it(self, harness: GuardHarness, guard: Guard, name: str) -> None:
        guard.set_if_absent(name, "first", harness.tick_s)
        harness.advance(harness.tick_s * 0.6)
        assert guard.set_if_absent(name, "second", 60) == "first"
        harness.advance(harness.tick_s * 0.6)
        assert guard.get(name) is None

    def test_a_deleted_key_is_absent_and_deleting_an_absent_one_is_no_error(self, guard: Guard, name: str) -> None:
        guard.set_if_absent(name, "first", 60)
        guard.delete(name)
        guard.delete(name)
        assert guard.get(name) is None
        assert guard.set_if_absent(name, "second", 60) is None

    @pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf")])
    def test_a_time_to_live_is_a_number_above_zero(self, guard: Guard, name: str, ttl: float) -> None:
        with pytest.raises(ValueError, match="ttl_s"):
            guard.set_if_absent(name, "", ttl)
        with pytest.raises(ValueError, match="ttl_s"):
            guard.acquire(name, "a", ttl)

    def test_expire_deletes_what_is_past_its_time_and_nothing_else(
        self, harness: GuardHarness, guard: Guard, name: str
    ) -> None:
        for n in range(20):
            guard.set_if_absent(f"{name}-{n}", "v", harness.tick_s if n % 2 else 600)
        harness.advance(harness.tick_s * 1.1)
        assert guard.expire() in (10, 0)  # A guard that expires keys by itself has nothing left to delete.
        assert guard.expire() == 0
        assert [n for n in range(20) if guard.get(f"{name}-{n}")] == list(range(0, 20, 2))

    def test_of_many_threads_one_sets(self, guard: Guard, name: str) -> None:
        outcomes: list[str | None] = []
        barrier = threading.Barrier(8)

        def work(n: int) -> None:
            for i in range(20):
                barrier.wait()
                outcomes.append(guard.set_if_absent(f"{name}-{i}", str(n), 60))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes.count(None) == 20

    def test_of_many_processes_one_sets(self, harness: GuardHarness, name: str) -> None:
        outcomes = together(set_when_told, harness.open_elsewhere, name)
        winners = [[key for key, seen in found.items() if seen is None] for found in outcomes]
        assert sorted(key for keys in winners for key in keys) == sorted(outcomes[0])

    # Leases

    def test_a_free_lease_is_taken_and_another_owner_is_refused(self, guard: Guard, name: str) -> None:
        lease = guard.acquire(name, "a", 60)
        assert isinstance(lease, Lease)
        assert (lease.name, lease.owner) == (name, "a")
        assert guard.acquire(name, "b", 60) is None

    def test_its_own_owner_takes_it_again_with_the_same_token(self, guard: Guard, name: str) -> None:
        first = guard.acquire(name, "a", 30)
        again = guard.acquire(name, "a", 60)
        assert first is not None
        assert again is not None
        assert again.token == first.token
        assert again.expires_ms > first.expires_ms

    def test_a_released_lease_is_free_and_the_next_token_is_higher(self, guard: Guard, name: str) -> None:
        first = guard.acquire(name, "a", 60)
        assert first is not None
        guard.release(first)
        second = guard.acquire(name, "b", 60)
        assert second is not None
        assert second.token > first.token

    def test_the_same_owner_gets_a_higher_token_after_it_let_go(self, guard: Guard, name: str) -> None:
        first = guard.acquire(name, "a", 60)
        assert first is not None
        guard.release(first)
        second = guard.acquire(name, "a", 60)
        assert second is not None
        assert second.token > first.token

    def test_an_expired_lease_is_free_and_its_holder_can_neither_renew_nor_release(
        self, harness: GuardHarness, guard: Guard, name: str
    ) -> None:
        first = guard.acquire(name, "a", harness.tick_s)
        assert first is not None
        harness.advance(harness.tick_s * 1.1)
        assert guard.renew(first, 60) is None
        second = guard.acquire(name, "b", 60)
        assert second is not None
        assert second.token > first.token
        assert guard.renew(first, 60) is None
        guard.release(first)
        assert guard.acquire(name, "c", 60) is None
        assert guard.renew(second, 60) is not None

    def test_an_expired_lease_cannot_be_renewed_even_while_nobody_took_it(
        self, harness: GuardHarness, guard: Guard, name: str
    ) -> None:
        first = guard.acquire(name, "a", harness.tick_s)
        assert first is not None
        harness.advance(harness.tick_s * 1.1)
        assert guard.renew(first, 60) is None
        second = guard.acquire(name, "a", 60)
        assert second is not None
        assert second.token > first.token

    def test_renewing_keeps_the_token_and_extends(self, harness: GuardHarness, guard: Guard, name: str) -> None:
        lease = guard.acquire(name, "a", harness.tick_s)
        for _ in range(3):
            harness.advance(harness.tick_s * 0.6)
            assert lease is not None
            renewed = guard.renew(lease, harness.tick_s)
            assert renewed is not None
            assert (renewed.token, renewed.owner) == (lease.token, "a")
            assert renewed.expires_ms > lease.expires_ms
            lease = renewed
        assert guard.acquire(name, "b", 60) is None

    def test_tokens_grow_after_expiry_cleaning_and_reopening(
        self, harness: GuardHarness, guard: Guard, name: str
    ) -> None:
        tokens: list[int] = []
        for n in range(4):
            other = harness.open()
            lease = other.acquire(name, f"owner-{n}", harness.tick_s)
            assert lease is not None
            tokens.append(lease.token)
            harness.advance(harness.tick_s * 1.1)
            other.expire()
            other.close()
        assert tokens == sorted(set(tokens))

    def test_leases_and_keys_of_one_name_are_two_things(self, guard: Guard, name: str) -> None:
        assert guard.acquire(name, "a", 60) is not None
        assert guard.get(name) is None
        assert guard.set_if_absent(name, "v", 60) is None
        guard.delete(name)
        assert guard.acquire(name, "b", 60) is None

    def test_of_many_processes_one_takes_a_lease_and_tokens_differ(self, harness: GuardHarness, name: str) -> None:
        outcomes = together(acquire_when_told, harness.open_elsewhere, name)
        taken = [(key, token) for found in outcomes for key, token in found.items() if token is not None]
        assert sorted(key for key, _ in taken) == sorted(outcomes[0])
        assert len({token for _, token in taken}) == len(taken)

    def test_a_killed_holder_s_lease_and_keys_stay_until_their_time(self, harness: GuardHarness, name: str) -> None:
        ready = spawn.Event()
        process = spawn.Process(target=die_holding_a_lease, args=(harness.open_elsewhere, name, ready))
        process.start()
        assert ready.wait(patient(60))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(patient(30))
        guard = harness.open_elsewhere()
        assert guard.get(name) == "kept"
        assert guard.acquire(name, "b", 60) is None
        guard.close()

    # All of it, in any order

    def test_it_agrees_with_a_model_in_any_order(self, harness: GuardHarness) -> None:
        class Machine(GuardMachine):
            def opened(self) -> GuardHarness:
                return harness

        run_state_machine_as_test(Machine, settings=settings(max_examples=40, stateful_step_count=25, deadline=None))


class GuardMachine(RuleBasedStateMachine):
    """Two keys, two leases, three owners and a clock, against dictionaries."""

    names = st.sampled_from(["n1", "n2"])
    owners = st.sampled_from(["a", "b", "c"])
    ticks = st.integers(1, 4)

    def opened(self) -> GuardHarness:
        raise AssertionError("a subclass names its guard")

    @initialize()
    def start(self) -> None:
        self.harness = self.opened()
        self.guard = self.harness.open()
        self.run = uuid.uuid4().hex[:8]
        # Times to live are whole ticks; the clock moves by a tick and a little, so that no boundary is in doubt.
        self.now = 0.0
        self.keys: dict[str, tuple[str, float]] = {}
        self.leases: dict[str, tuple[str, int, float]] = {}
        self.given: list[Lease] = []
        self.highest: dict[str, int] = {}

    def living(self, name: str) -> tuple[str, int] | None:
        held = self.leases.get(name)
        return held[:2] if held and held[2] > self.now else None

    @rule(name=names, value=st.sampled_from(["v1", "v2"]), ticks=ticks)
    def set_if_absent(self, name: str, value: str, ticks: int) -> None:
        held = self.keys.get(name)
        expected = held[0] if held and held[1] > self.now else None
        assert self.guard.set_if_absent(self.run + name, value, ticks * self.harness.tick_s) == expected
        if expected is None:
            self.keys[name] = (value, self.now + ticks)

    @rule(name=names)
    def delete(self, name: str) -> None:
        self.guard.delete(self.run + name)
        self.keys.pop(name, None)

    @rule(name=names, owner=owners, ticks=ticks)
    def acquire(self, name: str, owner: str, ticks: int) -> None:
        lease = self.guard.acquire(self.run + name, owner, ticks * self.harness.tick_s)
        held = self.living(name)
        if held is not None and held[0] != owner:
            assert lease is None
            return
        assert lease is not None
        if held is not None:
            assert lease.token == held[1]
        else:
            assert lease.token > self.highest.get(name, -1)
        self.highest[name] = lease.token
        self.leases[name] = (owner, lease.token, self.now + ticks)
        self.given.append(lease)

    @rule(data=st.data(), ticks=ticks)
    def renew_any_lease_ever_given(self, data: st.DataObject, ticks: int) -> None:
        if not self.given:
            return
        lease = data.draw(st.sampled_from(self.given))
        name = lease.name.removeprefix(self.run)
        held = self.living(name)
        renewed = self.guard.renew(lease, ticks * self.harness.tick_s)
        if held is not None and held[1] == lease.token:
            assert renewed is not None
            assert renewed.token == lease.token
            self.leases[name] = (held[0], held[1], self.now + ticks)
        else:
            assert renewed is None

    @rule(data=st.data())
    def release_any_lease_ever_given(self, data: st.DataObject) -> None:
        if not self.given:
            return
        lease = data.draw(st.sampled_from(self.given))
        name = lease.name.removeprefix(self.run)
        self.guard.release(lease)
        if name in self.leases and self.leases[name][1] == lease.token:
            del self.leases[name]

    @rule()
    def expire(self) -> None:
        self.guard.expire()

    @rule()
    def reopen(self) -> None:
        self.guard.close()
        self.guard = self.harness.open()

    @rule()
    def wait(self) -> None:
        self.harness.advance(self.harness.tick_s * 1.01)
        self.now += 1.01

    @invariant()
    def keys_are_what_the_model_says(self) -> None:
        if hasattr(self, "guard"):
            for name in ("n1", "n2"):
                held = self.keys.get(name)
                assert self.guard.get(self.run + name) == (held[0] if held and held[1] > self.now else None)

    def teardown(self) -> None:
        if hasattr(self, "guard"):
            self.guard.close()


def together(work: Callable[..., None], open_guard: Callable[[], Guard], name: str) -> list[dict[str, Any]]:
    """Run it in three processes that begin at the same moment, and gather what each saw."""
    barrier, results = spawn.Barrier(3), spawn.Queue()
    processes = [spawn.Process(target=work, args=(open_guard, name, n, barrier, results)) for n in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=patient(60)) for _ in processes]
    for process in processes:
        process.join(patient(30))
        assert process.exitcode == 0
    return found
