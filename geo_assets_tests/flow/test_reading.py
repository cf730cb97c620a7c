from __future__ import annotations

import pytest

from geo_assets.flow.dedup import DedupWindow
from geo_assets.flow.epochs import Epochs, epoch_of_mark, mark
from geo_assets.flow.reading import TriggerReader
from geo_assets.geofence.triggers import ENTER, FrameError, Trigger, encode


def frame(sequence: int, epoch: int) -> bytes:
    return encode(Trigger("bus-18", 'demo:"depot"', ENTER, 1_777_636_800_000, sequence, 3, 0, sequence, 1, epoch, 1))


def test_a_mark_reads_as_its_epoch_and_a_frame_as_none() -> None:
    assert epoch_of_mark(mark(70_000)) == 70_000
    assert epoch_of_mark(mark(1) + b"") == 1
    for other in (frame(1, 1), b"", b"\x00", b"\x00\xc0", b"\x00\x90", b"\x00\x91\xa1x"):
        assert epoch_of_mark(other) is None


def test_what_is_below_the_highest_epoch_of_its_partition_is_void() -> None:
    epochs = Epochs()
    assert epochs.valid(0, 3)
    assert epochs.valid(0, 3)
    assert epochs.valid(1, 1)
    assert epochs.valid(0, 4)
    assert not epochs.valid(0, 3)
    assert epochs.valid(1, 2)


def test_a_paused_run_that_goes_on_late_is_passed_over_and_a_repetition_is_told_once() -> None:
    reader = TriggerReader(DedupWindow(100))
    records = [
        (0, mark(1)), (0, frame(1, 1)), (0, frame(2, 1)),
        (0, mark(2)), (0, frame(3, 1)), (0, frame(2, 2)), (0, frame(3, 2)), (0, frame(4, 1)),
    ]  # fmt: skip
    assert [(t.sequence, t.epoch) for t in reader.read(records)] == [(1, 1), (2, 1), (3, 2)]
    assert (reader.marks, reader.void, reader.repeated) == (2, 2, 1)


def test_a_value_that_is_neither_mark_nor_frame_is_an_error() -> None:
    with pytest.raises(FrameError):
        TriggerReader().read([(0, b"\x07nonsense")])
