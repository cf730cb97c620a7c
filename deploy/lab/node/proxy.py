"""Connections to services: to ready endpoints in turn, as kube-proxy gives them out.

`routes` and `Turn` know no network; `Proxy` listens and copies bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Iterable
from typing import Any

from deploy.lab.network import local

Address = tuple[str, int]

_CHUNK = 1 << 16


def routes(services: Iterable[dict[str, Any]], slices: Iterable[dict[str, Any]]) -> dict[Address, list[Address]]:
    """Where connections to each address and port of a service may go: its ready endpoints.

    Without a ready one, those that still serve while they terminate. Headless services have no address: no route.

    Args:
        services: Services as the API has them.
        slices: Their EndpointSlices.
    """
    by_service: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in slices:
        name = (each["metadata"].get("labels") or {}).get("kubernetes.io/service-name")
        if name:
            by_service.setdefault((each["metadata"]["namespace"], name), []).append(each)
    found: dict[Address, list[Address]] = {}
    for service in services:
        spec, metadata = service["spec"], service["metadata"]
        address = spec.get("clusterIP")
        if not address or address == "None":
            continue
        own = by_service.get((metadata["namespace"], metadata["name"]), [])
        for port in spec.get("ports") or []:
            if port.get("protocol", "TCP") == "TCP":
                found[(local(address), int(port["port"]))] = _endpoints(own, port.get("name") or "")
    return found


def _endpoints(slices: list[dict[str, Any]], port_name: str) -> list[Address]:
    ready: set[Address] = set()
    ending: set[Address] = set()
    for each in slices:
        numbers = [port["port"] for port in each.get("ports") or [] if (port.get("name") or "") == port_name]
        for endpoint in each.get("endpoints") or []:
            conditions = endpoint.get("conditions") or {}
            addresses = {(local(address), int(number)) for address in endpoint["addresses"] for number in numbers}
            if conditions.get("ready", True):
                ready |= addresses
            elif conditions.get("serving") and conditions.get("terminating"):
                ending |= addresses
    return sorted(ready or ending)


class Turn:
    """Gives out the endpoints of one service one after the other, whatever comes and goes between."""

    def __init__(self) -> None:
        self.endpoints: list[Address] = []
        self._last: Address | None = None

    def next(self) -> Address | None:
        """The endpoint after the last one given out; None where there is none."""
        if not self.endpoints:
            return None
        after = [each for each in self.endpoints if self._last is not None and each > self._last]
        self._last = after[0] if after else self.endpoints[0]
        return self._last


class Proxy:
    """Listens on the address and port of every service, and passes each connection to one endpoint."""

    def __init__(self) -> None:
        self._turns: dict[Address, Turn] = {}
        self._servers: dict[Address, asyncio.Server] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._changing = asyncio.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="proxy")
        self._thread.start()

    def set_routes(self, found: dict[Address, list[Address]]) -> None:
        """Listen on these addresses and no others; connections that are open stay where they are."""
        asyncio.run_coroutine_threadsafe(self._set(found), self._loop).result(30)

    def close(self) -> None:
        """Listen no more, and cut what is open."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    async def _set(self, found: dict[Address, list[Address]]) -> None:
        async with self._changing:
            for gone in self._servers.keys() - found.keys():
                self._servers.pop(gone).close()
                del self._turns[gone]
            for where, endpoints in found.items():
                turn = self._turns.setdefault(where, Turn())
                turn.endpoints = endpoints
                if where not in self._servers:
                    try:
                        self._servers[where] = await asyncio.start_server(self._accept(turn), *where)
                    except OSError as fault:
                        print(f"proxy: cannot listen on {where[0]}:{where[1]}: {fault}", flush=True)

    async def _close(self) -> None:
        await self._set({})
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, turn: Turn) -> Any:
        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._connections.add(task)
            try:
                await _pass_on(turn.next(), reader, writer)
            except asyncio.CancelledError:
                _reset(writer)
            finally:
                self._connections.discard(task)

        return accepted


async def _pass_on(endpoint: Address | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy both ways until both sides are done; a client without an endpoint is refused."""
    if endpoint is None:
        _reset(writer)
        return
    try:
        back_reader, back_writer = await asyncio.open_connection(*endpoint)
    except OSError:
        _reset(writer)
        return
    done = await asyncio.gather(_copy(reader, back_writer), _copy(back_reader, writer))
    for end in (writer, back_writer):
        # A side that broke off breaks off the other too: an answer cut short must not look complete.
        end.close() if all(done) else _reset(end)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Copy one way until its end; returns whether it ended in order."""
    try:
        while chunk := await reader.read(_CHUNK):
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
        return True
    except OSError:
        _reset(writer)
        return False


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close so that the peer sees a broken connection."""
    held = writer.get_extra_info("socket")
    if held is not None:
        with contextlib.suppress(OSError):
            held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
