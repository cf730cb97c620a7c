"""Which partition a key belongs to: the same one that every Kafka client with the default partitioner chooses."""

from __future__ import annotations

import struct
from functools import lru_cache

_SEED = 0x9747B28C
_M = 0x5BD1E995
_MASK = 0xFFFFFFFF

_CACHED_KEY_CHARS = 128
"""Longer keys are hashed each time: a cache of them would be as large as a sender likes."""


def murmur2(data: bytes) -> int:
    """MurmurHash2, 32 bit, with the seed of Kafka's Java client (org.apache.kafka.common.utils.Utils).

    Returns:
        The hash as an unsigned number; Java shows the same bits signed.
    """
    length = len(data)
    h = _SEED ^ length
    whole = length & ~3
    for (k,) in struct.iter_unpack("<I", data[:whole]):
        k = (k * _M) & _MASK
        k ^= k >> 24
        h = ((h * _M) & _MASK) ^ ((k * _M) & _MASK)
    rest = data[whole:]
    if rest:
        h = ((h ^ int.from_bytes(rest, "little")) * _M) & _MASK
    h ^= h >> 13
    h = (h * _M) & _MASK
    return h ^ (h >> 15)


def partition_of(key: str, partitions: int) -> int:
    """The partition of a key among so many.

    Raises:
        UnicodeEncodeError: The key has no UTF-8 form (a lone surrogate).
    """
    hashed = _cached(key) if len(key) <= _CACHED_KEY_CHARS else murmur2(key.encode())
    # Kafka takes the sign bit off instead of the absolute value.
    return (hashed & 0x7FFFFFFF) % partitions


@lru_cache(maxsize=32_768)
def _cached(key: str) -> int:
    return murmur2(key.encode())
