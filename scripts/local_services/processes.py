"""Processes and ports of this machine: who lives, who descends from whom, which port is free.

A process is named by its id, its start time and the machine's boot, so that no reused id is ever mistaken for ours.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_children: dict[int, subprocess.Popen[Any]] = {}


@dataclass(frozen=True, slots=True)
class Process:
    """One process of this boot."""

    pid: int
    started: str


def adopt(child: subprocess.Popen[Any]) -> Process:
    """Remember a child of this process, so that it is reaped when it ends; returns its name."""
    _children[child.pid] = child
    return Process(child.pid, _started(child.pid) or "")


def lives(process: Process | None) -> bool:
    """Whether exactly this process runs; one that ended and was not reaped yet does not."""
    if process is None:
        return False
    child = _children.get(process.pid)
    if child is not None and child.poll() is not None:
        del _children[process.pid]
    return process.started != "" and _started(process.pid) == process.started


def family(process: Process) -> list[Process]:
    """The process and all that descend from it, parents first."""
    parents = _parents()
    found = [process.pid]
    for pid in found:
        found.extend(child for child, parent in parents.items() if parent == pid)
    named = [Process(pid, _started(pid) or "") for pid in found[1:]]
    return [process, *(each for each in named if each.started)]


def send(process: Process, number: signal.Signals) -> None:
    """Signal exactly this process; nothing happens when it is gone."""
    if lives(process):
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return


def wait_until_gone(processes: list[Process], seconds: float) -> list[Process]:
    """Wait for all to end; returns those that still live after `seconds`."""
    deadline = time.monotonic() + seconds
    left = [each for each in processes if lives(each)]
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [each for each in left if lives(each)]
    return left


def memory_bytes(process: Process) -> int:
    """Resident memory of the process and its descendants; what they share is counted once for each."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = 0
    for each in family(process):
        try:
            total += int((_PROC / str(each.pid) / "statm").read_text().split()[1]) * page
        except (OSError, IndexError):
            continue
    return total


def free_ports(count: int) -> list[int]:
    """Ports of loopback on which nothing listens.

    They lie below the range from which the system takes the ports of outgoing connections: a killed service's port
    would otherwise be given to any client meanwhile, even to the one that tries to reconnect to it.
    """
    low, high = 15_000, 32_000
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        if first > low + 1_000:
            high = min(high, first - 1)
    except (OSError, ValueError, IndexError):
        pass
    found: list[int] = []
    while len(found) < count:
        port = random.randint(low, high)
        if port not in found and not taken(port):
            found.append(port)
    return found


def taken(port: int) -> bool:
    """Whether another program holds this port of loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _boot() -> str:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Start time of a living process, None when there is none or all that is left waits to be reaped."""
    if _PROC.joinpath("self").exists():
        try:
            # The command stands in brackets and may itself contain spaces and brackets.
            fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        if fields[0] in "ZX" and not _threads_left(pid):
            return None
        return f"{_boot()}/{fields[19]}"
    answer = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, started = answer.stdout.strip().partition(" ")
    return None if not state or state.startswith("Z") else started.strip()


def _threads_left(pid: int) -> bool:
    """Whether a killed process still has threads on their way out: until the last is gone, its ports stay taken."""
    try:
        return len(os.listdir(_PROC / str(pid) / "task")) > 1
    except OSError:
        return False


def _parents() -> dict[int, int]:
    parents: dict[int, int] = {}
    if _PROC.joinpath("self").exists():
        for folder in _PROC.iterdir():
            if folder.name.isdigit():
                try:
                    parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                except (OSError, IndexError):
                    continue
        return parents
    answer = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=False)
    for line in answer.stdout.splitlines():
        pid, parent = line.split()
        parents[int(pid)] = int(parent)
    return parents
