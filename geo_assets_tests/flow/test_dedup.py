from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.flow.dedup import BloomFilter, DedupWindow


def key(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


class Slow:
    """The window, one key at a time."""

    def __init__(self, capacity: int, ttl_ms: int | None) -> None:
        self.capacity, self.ttl_ms = capacity, ttl_ms
        self.seen: OrderedDict[bytes, int] = OrderedDict()

    def admit(self, keys: list[bytes], now_ms: int) -> list[int]:
        if self.ttl_ms is not None:
            self.seen = OrderedDict((k, at) for k, at in self.seen.items() if at > now_ms - self.ttl_ms)
        new = []
        for place, one in enumerate(keys):
            if one not in self.seen:
                new.append(place)
                self.seen[one] = now_ms
        while len(self.seen) > self.capacity:
            self.seen.popitem(last=False)
        return new


batches = st.lists(st.tuples(st.lists(st.integers(0, 60), max_size=20), st.integers(0, 40)), min_size=1, max_size=60)


@given(batches=batches, capacity=st.integers(20, 40), ttl_ms=st.none() | st.integers(1, 100), bloom=st.booleans())
@settings(max_examples=200, deadline=None)
def test_it_tells_what_is_new_as_one_key_at_a_time_would(
    batches: list[tuple[list[int], int]], capacity: int, ttl_ms: int | None, bloom: bool
) -> None:
    window, slow = DedupWindow(capacity, ttl_ms, bloom=bloom), Slow(capacity, ttl_ms)
    now_ms = 0
    for numbers, passed in batches:
        now_ms += passed
        keys = [key(number) for number in numbers]
        assert window.admit(keys, now_ms) == slow.admit(keys, now_ms)
        assert len(window) == len(slow.seen)
        known = window.known([key(number) for number in range(61)])
        assert known == [key(number) in slow.seen for number in range(61)]


@given(st.lists(st.integers(0, 15), min_size=1, max_size=400))
@settings(max_examples=50, deadline=None)
def test_keys_that_meet_in_one_bucket_are_all_found(tails: list[int]) -> None:
    window = DedupWindow(1_000)
    rng = np.random.default_rng(len(tails))
    # The bucket is the low bits of the first half.
    keys = list(dict.fromkeys(bytes([tail]) + bytes(7) + rng.bytes(8) for tail in tails))
    assert window.admit(keys, 0) == list(range(len(keys)))
    assert window.admit(keys, 0) == []


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        DedupWindow(10).admit([b"x" * 8], 0)


def test_its_memory_does_not_change_and_no_key_of_the_window_is_forgotten() -> None:
    window = DedupWindow(20_000)
    before = window.nbytes
    for start in range(0, 100_000, 5_000):
        assert len(window.admit([key(number) for number in range(start, start + 5_000)], start)) == 5_000
        some = range(max(0, start - 14_000), start, 1_000)
        assert window.admit([key(number) for number in some], start) == []
    assert window.nbytes == before
    assert len(window) == 20_000


def test_the_filter_lets_one_in_a_hundred_through_at_most_when_it_is_fullest() -> None:
    rng = np.random.default_rng(1)
    bloom = BloomFilter(20_000)

    def some(count: int) -> np.ndarray:
        return bloom.places(rng.integers(0, 2**63, (count, 2)).astype(np.uint64))

    for _ in range(39):
        bloom.add(some(1_000))
    assert bloom.maybe(some(20_000)).mean() < 0.012


@given(st.lists(st.lists(st.integers(0, 200), min_size=1, max_size=8), max_size=60))
@settings(max_examples=50, deadline=None)
def test_the_filter_never_denies_what_was_added_within_its_window(batches: list[list[int]]) -> None:
    bloom = BloomFilter(32)
    added: list[int] = []
    for numbers in batches:
        rows = np.frombuffer(b"".join(map(key, numbers)), np.uint64).reshape(-1, 2)
        bloom.add(bloom.places(rows))
        added += numbers
        last = np.frombuffer(b"".join(map(key, added[-32:])), np.uint64).reshape(-1, 2)
        assert bloom.maybe(bloom.places(last)).all()


def test_what_the_filter_lets_through_in_vain_is_counted() -> None:
    window = DedupWindow(capacity=2_000)
    some = [hashlib.blake2b(b"%d" % n, digest_size=16).digest() for n in range(22_000)]
    for start in range(0, 20_000, 500):
        window.admit(some[start : start + 500], 0)
    in_vain = window.false_positives
    assert window.suspects == in_vain < 0.02 * 20_000
    assert window.admit(some[19_000:20_000], 0) == []
    assert (window.suspects, window.false_positives) == (in_vain + 1_000, in_vain)
