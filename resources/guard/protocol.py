"""What a guard promises: a fast filter in front of a durable check, never the only one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class GuardUnavailable(Exception):
    """The guard cannot answer now. Callers go on without it: slower, never wrong."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A held lease. `token` grows with every grant of the name: whoever writes compares it (fencing)."""

    name: str
    owner: str
    token: int
    expires_ms: int


@runtime_checkable
class Guard(Protocol):
    """Keys with a time to live, and leases."""

    def set_if_absent(self, key: str, value: str, ttl_s: float) -> str | None:
        """Set it and return None; when it is there and alive, leave it and return the value it has."""
        ...

    def get(self, key: str) -> str | None:
        """The value of a key that is alive."""
        ...

    def set_many_if_absent(self, values: Mapping[str, str], ttl_s: float) -> dict[str, str]:
        """`set_if_absent` of many in one go; those that were there and alive, with the value they have."""
        ...

    def get_many(self, keys: Sequence[str]) -> dict[str, str]:
        """Those of the keys that are alive, with their values, in one go."""
        ...

    def delete(self, key: str) -> None:
        """Forget a key."""
        ...

    def acquire(self, name: str, owner: str, ttl_s: float) -> Lease | None:
        """Take the lease if it is free, expired or this owner's already (same token then); None: another holds it."""
        ...

    def renew(self, lease: Lease, ttl_s: float) -> Lease | None:
        """Extend it if its token is still the current one and it has not expired; None when it was lost."""
        ...

    def release(self, lease: Lease) -> None:
        """Free it if its token is still the current one."""
        ...

    def expire(self) -> int:
        """Delete keys that are past their time; how many went."""
        ...

    def close(self) -> None:
        """Release files and connections."""
        ...
