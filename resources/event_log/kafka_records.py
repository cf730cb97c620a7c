"""From Kafka's messages to records: what foreign producers wrote must be readable too, whatever it is."""

from __future__ import annotations

from collections.abc import Mapping

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Message

from resources.event_log.protocol import Record


def text_of(data: bytes | str | None) -> str:
    r"""Bytes as text. What is not UTF-8 shows as `\xff` escapes: nothing fails on it later, and no byte is lost."""
    if data is None:
        return ""
    return data if isinstance(data, str) else data.decode("utf-8", "backslashreplace")


def record_of(message: Message, topic: str) -> Record:
    r"""A message as a record of a topic by our name.

    Keys and headers that are no UTF-8 become text with `\xff` escapes, a header without a value becomes an empty one,
    and of several headers of one name the last counts.
    """
    headers: Mapping[str, str] = {}
    found = message.headers()
    if found:
        headers = {name: text_of(value) for name, value in found}
    key = message.key()
    kind, stamp = message.timestamp()
    return Record(
        topic,
        message.partition() or 0,
        message.offset() or 0,
        None if key is None else text_of(key),
        message.value(),  # pyright: ignore[reportArgumentType]
        headers,
        0 if kind == TIMESTAMP_NOT_AVAILABLE else stamp,
    )


def size_of(record: Record) -> int:
    """Bytes of a record in memory, roughly: text is counted by characters."""
    size = len(record.key or "") + len(record.value or b"")
    if record.headers:
        size += sum(len(name) + len(text) for name, text in record.headers.items())
    return size
