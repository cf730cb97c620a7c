"""A request's body: counted while it is read, spooled to disk above a size, verified as sent, then decompressed.

No endpoint, no log: what a body means is decided elsewhere. Everything that could keep the event loop busy runs in the
given executor.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import mmap
import tempfile
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import IO, Self, cast

from geo_assets.services.problems import ProblemError, unavailable

_CHUNK = 1 << 20
"""Bytes written or decompressed at a time."""


class MemoryBudget:
    """Bytes that all bodies together may hold in memory. Full: a body goes to disk earlier than it would."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """Take so many bytes if they are there."""
        with self._lock:
            if self.taken + size > self.limit:
                return False
            self.taken += size
            return True

    def give(self, size: int) -> None:
        """Give bytes back."""
        with self._lock:
            self.taken -= size


class Spool:
    """Bytes in order, in memory up to a size (and while the budget lasts), in an unnamed file beyond it.

    Args:
        folder: Where the file would be; it is made when it is needed.
        memory_limit: Bytes to keep in memory.
        budget: Shared by all bodies.
    """

    def __init__(self, folder: Path, memory_limit: int, budget: MemoryBudget) -> None:
        self._folder, self._memory_limit, self._budget = folder, memory_limit, budget
        self._chunks: list[bytes] = []
        self._held = 0
        self._file: IO[bytes] | None = None
        self._map: mmap.mmap | None = None
        self.size = 0

    @property
    def on_disk(self) -> bool:
        """Whether the bytes are in a file."""
        return self._file is not None

    def fits(self, chunk: bytes) -> bool:
        """Whether adding the chunk touches no file, and so may be done on the event loop."""
        return self._file is None and self.size + len(chunk) <= self._memory_limit

    def add(self, chunk: bytes) -> None:
        """Append bytes. Raises OSError when the disk is full."""
        if self._file is None:
            if self.size + len(chunk) <= self._memory_limit and self._budget.take(len(chunk)):
                self._held += len(chunk)
                self._chunks.append(chunk)
                self.size += len(chunk)
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - closed by close()
            self._file.writelines(self._chunks)
            self._release()
        self._file.write(chunk)
        self.size += len(chunk)

    def bytes(self) -> bytes:
        """All bytes; those of a file as a read-only map of it, which takes no memory of this process's own."""
        if self._file is None:
            if len(self._chunks) > 1:
                self._chunks = [b"".join(self._chunks)]
            return self._chunks[0] if self._chunks else b""
        if self._map is None:
            self._file.flush()
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return cast("bytes", self._map)

    def close(self) -> None:
        """Free memory and file."""
        self._release()
        if self._map is not None:
            # A view of it may still be alive in a traceback; the file goes when that does.
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _release(self) -> None:
        self._chunks.clear()
        self._budget.give(self._held)
        self._held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def receive(
    stream: AsyncIterator[bytes],
    spool: Spool,
    *,
    on_chunk: Callable[[bytes], None],
    limit: int,
    declared: str | None,
    executor: Executor,
    idle_s: float,
) -> None:
    """Read the body into the spool, as it was sent.

    Args:
        stream: The chunks as they arrive.
        spool: Where they go.
        on_chunk: Sees every chunk (the signature).
        limit: Bytes it may have.
        declared: Its Content-Length, believed only where it is already too much.
        executor: For writes to disk.
        idle_s: Seconds without a byte after which the sender is given up.

    Raises:
        ProblemError: 413 over the limit, 408 when the sender stopped, 503 when the disk took nothing.
    """
    if declared is not None and declared.isascii() and declared.isdigit() and int(declared[:18]) > limit:
        raise too_large(int(declared[:18]), limit)
    loop = asyncio.get_running_loop()
    waiting: list[bytes] = []
    waiting_size = 0
    chunks = aiter(stream)
    while True:
        try:
            async with asyncio.timeout(idle_s):
                chunk = await anext(chunks, None)
        except TimeoutError:
            detail = f"The body stopped coming: no byte for {idle_s:g} s after {spool.size + waiting_size}."
            raise ProblemError(408, "timeout", detail, headers={"Connection": "close"}) from None
        if chunk is None:
            break
        if not chunk:
            continue
        if spool.size + waiting_size + len(chunk) > limit:
            raise too_large(None, limit)
        on_chunk(chunk)
        if not waiting and spool.fits(chunk):
            spool.add(chunk)
            continue
        waiting.append(chunk)
        waiting_size += len(chunk)
        if waiting_size >= _CHUNK:
            await loop.run_in_executor(executor, _write, spool, b"".join(waiting))
            waiting, waiting_size = [], 0
    if waiting:
        await loop.run_in_executor(executor, _write, spool, b"".join(waiting))


def gunzip(sent: Spool, into: Spool, limit: int) -> None:
    """Decompress a gzip body (RFC 1952; several members are one after the other). For a worker thread.

    Raises:
        ProblemError: 413 as soon as more than `limit` bytes came out, 400 where it is no gzip or ends early, 503 when
            the disk took nothing.
    """
    data = memoryview(sent.bytes())
    try:
        position = 0
        while True:
            inflater = zlib.decompressobj(wbits=31)
            piece: bytes | memoryview = b""
            while not inflater.eof:
                if not piece:
                    piece = data[position : position + 65536]
                    position += len(piece)
                    if not piece:
                        raise _bad_gzip("it ends before its end")
                try:
                    plain = inflater.decompress(piece, _CHUNK)
                except zlib.error as error:
                    raise _bad_gzip(str(error)) from None
                piece = inflater.unconsumed_tail
                if into.size + len(plain) > limit:
                    raise too_large(None, limit)
                if plain:
                    _write(into, plain)
            position -= len(inflater.unused_data)
            if position >= len(data):
                return
    finally:
        data.release()


def digest(spool: Spool) -> str:
    """The sha256 of the bytes, hex."""
    return hashlib.sha256(spool.bytes()).hexdigest()


def too_large(size: int | None, limit: int) -> ProblemError:
    """The answer to a body over the limit."""
    detail = f"The body is over {limit} bytes; send it in several parts, or import the file."
    return ProblemError(413, "too-large", detail, field="body", value=size, limit=limit)


def _bad_gzip(problem: str) -> ProblemError:
    return ProblemError(
        400, "encoding", f"The body is no gzip stream: {problem}.", field="Content-Encoding", value="gzip"
    )


def _write(spool: Spool, data: bytes) -> None:
    try:
        spool.add(data)
    except OSError as error:
        raise unavailable(f"The body cannot be kept on disk now ({error.strerror}).", 10) from error
