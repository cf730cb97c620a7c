"""What a purge promises: caches forget exactly the URLs they are told, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


class PurgeMisconfigured(Exception):
    """The caches cannot be told from the setting; the message names it."""


@runtime_checkable
class Purge(Protocol):
    """Makes caches forget URLs. There is no way to say "all": an empty list forgets nothing."""

    def purge(self, urls: Sequence[str]) -> list[str]:
        """Make every cache forget these URLs, in all their variants; those that one of the caches did not confirm.

        Bounded in time, whatever the caches do. Never raises for a cache's fault.

        Raises:
            ValueError: One is not the exact URL of a document; no cache was asked anything.
        """
        ...

    def close(self) -> None:
        """Release connections."""
        ...
