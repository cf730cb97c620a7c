"""Frames: one trigger as bytes, and the key by which it is known. Loads without numpy: slim consumers read them too.

The frame is a contract with every consumer of `[triggers]`: docs/triggers.md tells it in prose, with a decoder in
another language. Version 1 is the byte 0x01 and a MessagePack array of eleven members, in this order:

    device_id         str   as the device sent it
    fence_id          str   `source:id` of the fence, the id as JSON text: `demo:"depot"` with its quotes, or `demo:123`
    state             int   0 EXIT, 1 ENTER, 2 DWELL
    event_time_ms     int   when it happened, milliseconds since 1970-01-01T00:00:00Z, by the device's time
    sequence          int   of the device: one up with each of its triggers, whatever the fence
    priority          int   0 to 9, the fence's
    source_partition  int   partition of `[positions]`
    source_offset     int   offset in it up to which records were read when this came out (the next one's offset)
    fence_revision    int   of the set of fences by which it was judged
    epoch             int   of the routing run that sent it; void below the highest one seen in its partition
    emitted_ns        int   when it was made, nanoseconds since the epoch, by the router's clock

A later version may append members: read the ones you know and pass the rest over. The first byte rises only when that
would be wrong. `epoch` and `emitted_ns` differ between two sendings of one trigger; everything else is equal, and so is
its key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec

VERSION = b"\x01"
"""First byte of a frame."""


class State(IntEnum):
    """What happened. The numbers are the order of two things that happened at once: EXIT first."""

    EXIT = 0
    ENTER = 1
    DWELL = 2


EXIT, ENTER, DWELL = State
NAMES = ("EXIT", "ENTER", "DWELL")


class Trigger(msgspec.Struct, array_like=True, gc=False):
    """One trigger. Its members are those of the frame, in the frame's order (see the module)."""

    device_id: str
    fence_id: str
    state: int
    event_time_ms: int
    sequence: int
    priority: int
    source_partition: int
    source_offset: int
    fence_revision: int = 0
    epoch: int = 0
    emitted_ns: int = 0


class FrameError(ValueError):
    """Bytes that are no frame of a known version."""


_encoder = msgspec.msgpack.Encoder()
_encode = _encoder.encode
_decode = msgspec.msgpack.Decoder(Trigger).decode


def encode(trigger: Trigger) -> bytes:
    """The frame of one trigger."""
    return VERSION + _encode(trigger)


def encode_many(triggers: Sequence[Trigger]) -> list[bytes]:
    """The frames of many triggers."""
    version, one = VERSION, _encode
    return [version + one(trigger) for trigger in triggers]


def decode(frame: bytes) -> Trigger:
    """The trigger of a frame.

    Raises:
        FrameError: It is none, or of a version that is not known here.
    """
    if frame[:1] != VERSION:
        raise FrameError(f"frame: version byte {frame[:1].hex() or 'missing'}, known is {VERSION.hex()}")
    try:
        trigger = _decode(memoryview(frame)[1:])
    except msgspec.MsgspecError as fault:
        raise FrameError(f"frame: {fault}") from None
    if not 0 <= trigger.state <= 2:
        raise FrameError(f"frame: state {trigger.state} is none of 0 EXIT, 1 ENTER, 2 DWELL")
    return trigger


def key(trigger: Trigger) -> bytes:
    """The idempotency key of a trigger, 16 bytes: device, fence, state, second of event time, sequence.

    BLAKE2b-128 over the MessagePack array of the five. What a replay produces again has the same key.
    """
    return hashlib.blake2b(
        _encode((trigger.device_id, trigger.fence_id, trigger.state, trigger.event_time_ms // 1000, trigger.sequence)),
        digest_size=16,
    ).digest()


def keys(triggers: Sequence[Trigger]) -> list[bytes]:
    """The idempotency keys of many triggers."""
    one, digest = _encode, hashlib.blake2b
    return [
        digest(one((t.device_id, t.fence_id, t.state, t.event_time_ms // 1000, t.sequence)), digest_size=16).digest()
        for t in triggers
    ]


def to_json(trigger: Trigger) -> dict[str, Any]:
    """The members of a trigger by name, for browsers: the state as a word, what exceeds 2^53 as a text."""
    return {
        "device_id": trigger.device_id,
        "fence_id": trigger.fence_id,
        "state": NAMES[trigger.state],
        "event_time_ms": trigger.event_time_ms,
        "sequence": trigger.sequence,
        "priority": trigger.priority,
        "source_partition": trigger.source_partition,
        "source_offset": trigger.source_offset,
        "fence_revision": trigger.fence_revision,
        "epoch": trigger.epoch,
        "emitted_ns": str(trigger.emitted_ns),
    }
