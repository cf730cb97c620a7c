"""A Redis server of a test's own, to be killed, flushed and misconfigured as the shared one never may."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from geo_assets_tests.needs import missing
from geo_assets_tests.waiting import patient

PASSWORD = "a-password-nobody-may-read"


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class OwnRedis:
    """One server on loopback with its data in a folder; started again, it has its port and its data again.

    Args:
        folder: Where its append-only file is.
        options: More of its options, such as `--maxmemory 1mb`.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder, self._options = folder, options
        self.port = free_port()
        self.url = f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        binary = shutil.which("redis-server")
        if binary is None:
            missing("redis-server is not installed")
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [
            binary, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder), "--save", "",
            "--appendonly", "yes", "--appendfsync", "always", "--requirepass", PASSWORD, *self._options,
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + patient(60)
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.RedisError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.02)

    def client(self) -> redis.Redis:
        """A plain client."""
        return redis.Redis.from_url(self.url, decode_responses=True, socket_timeout=patient(30))

    def kill(self) -> None:
        """kill -9, as a machine that loses power."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop it where it is: it keeps its connections and answers nobody."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def own_redis(folder: Path, *options: str) -> Iterator[OwnRedis]:
    """A running server that is gone afterwards."""
    server = OwnRedis(folder, *options)
    server.start()
    try:
        yield server
    finally:
        server.kill()
