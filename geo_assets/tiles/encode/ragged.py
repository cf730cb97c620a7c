"""Ragged arrays: many short runs in one flat array, told apart by offsets. Shapes, tags and bytes are laid out so.

Methods of arrays are called here and in the modules around rather than numpy's functions of the same name: those are
Python wrappers, and a tile of twenty features costs little else than calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int32]
"""What is kept is kept small."""
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def offsets(counts: npt.NDArray[Any]) -> Ints:
    """Where each run begins, and after the last one where it ends: n counts make n + 1 offsets."""
    result = np.empty(len(counts) + 1, np.int64)
    result[0] = 0
    counts.cumsum(out=result[1:])
    return result


def spread(starts: Ints, counts: Ints, bounds: Ints | None = None) -> Ints:
    """Flat positions of runs: `starts[i], starts[i] + 1, …`, `counts[i]` of them, one run after the other.

    Args:
        starts: First position of each run.
        counts: Length of each run.
        bounds: `offsets(counts)`, when the caller has them anyway.
    """
    if bounds is None:
        bounds = offsets(counts)
    shift: Ints = (starts - bounds[:-1]).repeat(counts)
    return shift + np.arange(len(shift))


def within(counts: Ints, bounds: Ints) -> Ints:
    """Number of each element in its run: 0, 1, … for each of the runs; `bounds` are `offsets(counts)`."""
    begin: Ints = bounds[:-1].repeat(counts)
    return np.arange(len(begin)) - begin


def sums(values: npt.NDArray[Any], bounds: Ints) -> Ints:
    """Sum of each run; 0 for an empty one (`np.add.reduceat` would give its neighbour's first value)."""
    total = offsets(values)[bounds]
    return total[1:] - total[:-1]


def where(condition: Bools) -> Ints:
    """Positions at which a condition holds."""
    return condition.nonzero()[0]
