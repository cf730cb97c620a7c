"""Ragged arrays: many short runs in one flat array, told apart by offsets. Shapes, tags and bytes are laid out so."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def offsets(counts: npt.NDArray[Any]) -> Ints:
    """Where each run begins, and after the last one where it ends: n counts make n + 1 offsets."""
    result = np.empty(len(counts) + 1, np.int64)
    result[0] = 0
    np.cumsum(counts, out=result[1:])
    return result


def spread(starts: Ints, counts: Ints) -> Ints:
    """Flat positions of runs: `starts[i], starts[i] + 1, …`, `counts[i]` of them, one run after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)


def sums(values: npt.NDArray[Any], bounds: Ints) -> npt.NDArray[Any]:
    """Sum of each run; 0 for an empty one (`np.add.reduceat` would give its neighbour's first value)."""
    total = np.empty(len(values) + 1, np.result_type(values, np.int64))
    total[0] = 0
    np.cumsum(values, out=total[1:])
    return total[bounds[1:]] - total[bounds[:-1]]
