"""Epochs: which run may write. A trigger below the highest epoch seen in its partition is void.

A routing run takes a higher epoch, says so in every partition by a mark of its own, and only then looks at what is
there. Whatever a run before it still sends lands behind the mark, where every reader passes it over.

A mark is the byte 0x00 and a MessagePack array whose first member is the epoch; its record has no key. docs/triggers.md
tells consumers.
"""

from __future__ import annotations

import msgspec

MARK = b"\x00"
"""First byte of a mark. Frames of triggers begin with their version, from 1 on."""


def mark(epoch: int) -> bytes:
    """The value of the record by which a run takes over a partition."""
    return MARK + msgspec.msgpack.encode((epoch,))


def epoch_of_mark(value: bytes) -> int | None:
    """The epoch of a mark; None for what is none."""
    if value[:1] != MARK:
        return None
    try:
        members = msgspec.msgpack.decode(memoryview(value)[1:])
    except msgspec.MsgspecError:
        return None
    if not isinstance(members, list) or not members or type(members[0]) is not int:
        return None
    return members[0]


class Epochs:
    """The highest epoch seen in each partition."""

    def __init__(self) -> None:
        self.highest: dict[int, int] = {}

    def valid(self, partition: int, epoch: int) -> bool:
        """Whether something of this epoch counts, read in the partition's order; raises the partition's if higher."""
        if epoch < self.highest.get(partition, 0):
            return False
        self.highest[partition] = epoch
        return True
