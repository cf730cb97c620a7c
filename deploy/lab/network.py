"""Addresses of one lab: what the cluster calls them, and where on loopback they really are.

Kubernetes refuses loopback addresses in endpoints, and a machine's own network is not ours to change. So pods and
services have addresses of 10.0.0.0/8 in the API, and each stands for the address of loopback with the same last three
numbers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from deploy.lab.faults import LabFault


@dataclass(frozen=True, slots=True)
class Network:
    """The second number of the pods' addresses; the services' is 64 above."""

    number: int

    @property
    def service_range(self) -> str:
        """All addresses that services may get."""
        return f"10.{self.number + 64}.0.0/16"

    @property
    def api_address(self) -> str:
        """The address that the first service, `kubernetes`, always gets."""
        return f"10.{self.number + 64}.0.1"

    def pod_address(self, node: int, index: int) -> str:
        """The address of a node's pod, as the API shows it."""
        return f"10.{self.number}.{node}.{index}"


def local(address: str) -> str:
    """The address of loopback that an address of the cluster stands for."""
    first, rest = address.split(".", 1)
    return f"127.{rest}" if first == "10" else address


def free_network() -> Network:
    """A network in which nothing listens."""
    used = _listening()
    numbers = [number for number in range(64, 128) if not {number, number + 64} & used]
    if not numbers:
        raise LabFault("something listens in every one of 127.64.0.0 to 127.191.255.255")
    return Network(random.choice(numbers))


def _listening() -> set[int]:
    """The second number of every address of loopback with a listening socket."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, address, _, state = line.split()[:4]
        packed = address.split(":")[0]
        if state == "0A" and packed.endswith("7F"):
            found.add(int(packed[4:6], 16))
    return found
