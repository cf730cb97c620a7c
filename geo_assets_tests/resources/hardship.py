"""What makes a disk fail for a process that asks for it: no more room, no permission. For spawned processes alone."""

from __future__ import annotations

import ctypes
import os
import resource


def fill_the_disk(limit_bytes: int) -> None:
    """No file of this process grows beyond the limit (RLIMIT_FSIZE): to a program that is a disk without room."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def free_the_disk() -> None:
    """Undo `fill_the_disk`."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def obey_permissions() -> bool:
    """Drop root's power to pass over permissions (capset(2), version 3); whether it worked or was not needed."""
    if os.geteuid() != 0:
        return True
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    return ctypes.CDLL(None, use_errno=True).capset(header, nothing) == 0
