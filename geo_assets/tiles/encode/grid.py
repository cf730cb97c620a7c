"""Geometry to grid: shapes in world fractions become clipped, valid, integer shapes in the units of their tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import shapely

from geo_assets.tiles.encode.ragged import Bools, Floats, Ints, spread, sums
from geo_assets.tiles.encode.shapes import LINE, POINT, POLYGON, Geometries, Shapes, concatenate, each, shapes_of

SIMPLIFIED_FROM = {LINE: 3, POLYGON: 6}
"""Coordinates from which a line or polygon is simplified: a line of two and a ring of four corners keep them all."""

THINNED_FROM = 32
"""Coordinates from which a ring or line is thinned before it is clipped; below, clipping is as cheap."""

SETTLE_ROUNDS = 8
"""How often a polygon that cannot be snapped is rounded and mended; spikes settle in one or two."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What of the pairs shows: shapes with integer coordinates, y down, exterior rings of positive area, unclosed.

    `pair[i]` is the pair that item i draws. `faults` are pairs that could not be drawn, and why.
    """

    shapes: Shapes
    pair: Ints
    faults: list[tuple[int, str]]


def simplify(shapes: Shapes, index: Ints, tolerance: Floats, zoom: int) -> tuple[Shapes, Ints]:
    """Simplify items for a zoom, before any clipping: neighbouring tiles draw the same line.

    Args:
        shapes: Items in fractions of the world's side.
        index: Items that show at this zoom.
        tolerance: (index) pixels of a 256-pixel tile, as in `Layer.simplify`.
        zoom: Zoom of the tiles.

    Returns:
        The simplified items, and which of `index` they stand for; the others need no simplification.
    """
    vertices = np.diff(shapes.item_points())[index]
    kind = shapes.kind[index]
    enough = np.where(kind == POLYGON, SIMPLIFIED_FROM[POLYGON], SIMPLIFIED_FROM[LINE])
    wanted = np.flatnonzero((kind != POINT) & (tolerance > 0) & (vertices >= enough))
    if not len(wanted):
        return Shapes.empty(), wanted
    part = shapes.take(index[wanted])
    # Pixels of this zoom: a power of two, so that the way there and back changes no bit.
    pixels = float(256 << zoom)
    geometries = part.moved(part.xy * pixels).geometries()
    position = np.arange(len(wanted))
    simple, _ = each(
        lambda of: shapely.simplify(of["geometry"], of["tolerance"], preserve_topology=True),
        _records(geometries, tolerance[wanted]),
    )
    result: list[Shapes] = []
    of: list[Ints] = []
    for wanted_kind in (LINE, POLYGON):
        this = np.flatnonzero(part.kind == wanted_kind)
        if len(this):
            shape, owner = shapes_of(simple[this], wanted_kind)
            result.append(shape)
            of.append(position[this[owner]])
    shape = concatenate(result)
    return shape.moved(shape.xy / pixels), wanted[np.concatenate(of)]


def draw(shapes: Shapes, item: Ints, zoom: Ints, column: Ints, row: Ints, *, extent: int, buffer: int) -> Drawn:
    """Draw items into tiles.

    Args:
        shapes: Items in fractions of the world's side, y south.
        item: (pairs) which item a pair draws.
        zoom: (pairs) zoom of the tile a pair draws into.
        column: (pairs) its x.
        row: (pairs) its y.
        extent: Units a side of a tile.
        buffer: Units by which a tile reaches over its edge.
    """
    scale = np.ldexp(float(extent), zoom.astype(np.int32))
    origin = np.empty((len(item), 2))
    origin[:, 0] = column
    origin[:, 1] = row
    origin *= extent
    low, high = shapes.bounds()
    low = low[item] * scale[:, None] - origin
    high = high[item] * scale[:, None] - origin
    near = ((high >= -buffer) & (low <= extent + buffer)).all(axis=1)
    inside = ((low >= -buffer) & (high <= extent + buffer)).all(axis=1)

    def place(pair: Ints) -> Shapes:
        part = shapes.take(item[pair])
        lengths = np.diff(part.item_points())
        xy = part.xy * np.repeat(scale[pair], lengths)[:, None]
        xy -= np.repeat(origin[pair], lengths, axis=0)
        return part.moved(xy)

    within = np.flatnonzero(inside)
    crossing = np.flatnonzero(near & ~inside)
    placed, pairs, faults = [place(within)], [within], []
    if len(crossing):
        clipped, of, faults = _clip(place(crossing), -buffer, extent + buffer)
        placed.append(clipped)
        pairs.append(crossing[of])
        faults = [(int(crossing[position]), reason) for position, reason in faults]
    exact = concatenate(placed)
    pair = np.concatenate(pairs)

    done: list[Shapes] = []
    done_pair: list[Ints] = []
    for kind, finish in ((POINT, _points), (LINE, _lines)):
        of = np.flatnonzero(exact.kind == kind)
        if len(of):
            shape, left = finish(exact if len(of) == len(exact) else exact.take(of))
            done.append(shape)
            done_pair.append(pair[of[left]])
    of = np.flatnonzero(exact.kind == POLYGON)
    if len(of):
        unrounded = exact if len(of) == len(exact) else exact.take(of)
        shape, left, broken = _polygons(unrounded)
        done.append(shape)
        done_pair.append(pair[of[left]])
        if len(broken):
            source = pair[of[broken]]
            whole = place(source)
            cut = ~inside[source]
            shape, left, broken_faults = _snap(unrounded.take(broken), whole, cut, -buffer, extent + buffer)
            done.append(shape)
            done_pair.append(source[left])
            faults += [(int(source[position]), reason) for position, reason in broken_faults]
    return Drawn(concatenate(done), np.concatenate(done_pair) if done_pair else np.zeros(0, np.int64), faults)


def _clip(shapes: Shapes, low: float, high: float) -> tuple[Shapes, Ints, list[tuple[int, str]]]:
    """Clip items to the square low..high: what is left, of which item, and what could not be clipped."""
    result: list[Shapes] = []
    owners: list[Ints] = []
    faults: list[tuple[int, str]] = []
    of = np.flatnonzero(shapes.kind == POINT)
    if len(of):
        part = shapes.take(of)
        part = part.keep_points(((part.xy >= low) & (part.xy <= high)).all(axis=1))
        part, left = part.keep_rings(np.diff(part.points) > 0)
        result.append(part)
        owners.append(of[left])
    for kind in (LINE, POLYGON):
        of = np.flatnonzero(shapes.kind == kind)
        if not len(of):
            continue
        part = _thin(shapes if len(of) == len(shapes) else shapes.take(of), low, high)
        clipped, errors = each(lambda these: shapely.clip_by_rect(these, low, low, high, high), part.geometries())
        if errors:
            failed = np.array(sorted(errors))
            clipped[failed], still = each(
                lambda these: shapely.intersection(shapely.make_valid(these), shapely.box(low, low, high, high)),
                shapes.take(of[failed]).geometries(),
            )
            faults += [(int(of[failed[position]]), _reason("clipping", error)) for position, error in still.items()]
        part, owner = shapes_of(clipped, kind)
        result.append(part)
        owners.append(of[owner])
    return concatenate(result), np.concatenate(owners), faults


def _thin(shapes: Shapes, low: float, high: float) -> Shapes:
    """Leave out coordinates that cannot matter inside the square low..high.

    A coordinate whose neighbours on both sides lie in the same outer field (left, above left, above, …) as itself goes:
    the line that replaces it stays in that field, and no edge that meets the square changes. This turns a coastline of
    a million vertices into the few that the tile sees, for the price of some comparisons.
    """
    long = np.diff(shapes.points) >= THINNED_FROM
    if not long.any():
        return shapes
    x, y = shapes.xy[:, 0], shapes.xy[:, 1]
    field = (x > high).astype(np.int8) - (x < low) + 3 * ((y > high).astype(np.int8) - (y < low))
    keep = np.ones(len(field), np.bool_)
    keep[1:-1] = (field[1:-1] == 0) | (field[1:-1] != field[:-2]) | (field[1:-1] != field[2:])
    keep[shapes.points[:-1]] = True
    keep[shapes.points[1:] - 1] = True
    # A closed ring needs four coordinates; one that lies in a single field is kept as it is.
    whole = ~long | (sums(keep, shapes.points) < 4)
    keep |= np.repeat(whole, np.diff(shapes.points))
    return shapes.keep_points(keep)


def _points(shapes: Shapes) -> tuple[Shapes, Ints]:
    """Round points; those of one item that fall together are one."""
    xy = np.rint(shapes.xy)
    shapes = shapes.moved(xy)
    everything = np.arange(len(shapes))
    if len(xy) == len(shapes):
        return shapes, everything
    owner = np.repeat(everything, np.diff(shapes.item_points()))
    order = np.lexsort((xy[:, 1], xy[:, 0], owner))
    again = np.zeros(len(xy), np.bool_)
    again[1:] = (owner[order[1:]] == owner[order[:-1]]) & (xy[order[1:]] == xy[order[:-1]]).all(axis=1)
    keep = np.ones(len(xy), np.bool_)
    keep[order[again]] = False
    return shapes.keep_points(keep), everything


def _lines(shapes: Shapes) -> tuple[Shapes, Ints]:
    """Round lines, without repeated vertices and without lines that became a point."""
    shapes = _round(shapes)
    return shapes.keep_rings(np.diff(shapes.points) > 1)


def _polygons(shapes: Shapes) -> tuple[Shapes, Ints, Ints]:
    """Round polygons: those that are valid then, which items they are, and which items rounding broke.

    What collapsed (a ring of fewer than three different corners, or without height or width) is in neither.
    """
    shapes, left = _without_collapsed(_round(shapes))
    if not len(shapes):
        return shapes, left, np.zeros(0, np.int64)
    area = _areas(shapes)
    good = _convex(shapes, area)
    unsure = np.flatnonzero(~good)
    if len(unsure):
        part = shapes if len(unsure) == len(shapes) else shapes.take(unsure)
        # A line of three collinear corners and back is a ring without area, and no valid one.
        good[unsure] = shapely.is_valid(part.geometries())
    valid = np.flatnonzero(good)
    broken = left[~good]
    if len(valid) != len(shapes):
        shapes = shapes.take(valid)
        area = _areas(shapes)
    return _oriented(shapes, area), left[valid], broken


def _snap(
    unrounded: Shapes, whole: Shapes, cut: Bools, low: float, high: float
) -> tuple[Shapes, Ints, list[tuple[int, str]]]:
    """Snap-round polygons that rounding alone would break.

    Snapping starts from the unrounded geometry: GEOS 3.14 raises when it is given the rounded, invalid ring. What is
    invalid before (bad input, or a clip that went wrong) is mended first, from the whole geometry.

    Args:
        unrounded: Polygons, clipped where they cross the square.
        whole: The same before clipping.
        cut: Which of them were clipped.
        low: West and north side of the square, units.
        high: East and south side of it.
    """
    geometries = unrounded.geometries()
    bad = np.flatnonzero(~shapely.is_valid(geometries))
    faults: list[tuple[int, str]] = []
    if len(bad):
        box = shapely.box(low, low, high, high)
        mended, errors = each(_mend, whole.take(bad).geometries())
        crossing = np.flatnonzero(cut[bad] & (mended != None))  # noqa: E711 - elementwise
        if len(crossing):
            mended[crossing], cut_errors = each(lambda these: shapely.intersection(these, box), mended[crossing])
            errors |= {int(crossing[position]): error for position, error in cut_errors.items()}
        geometries[bad] = mended
        faults += [(int(bad[position]), _reason("repair", error)) for position, error in errors.items()]
    snapped, errors = each(lambda these: shapely.set_precision(these, 1.0), geometries)
    shapes, left = _snapped(snapped)
    # Snapping itself may raise, or leave what further rounding breaks, on spikes thinner than a unit.
    again = np.union1d(left[~shapely.is_valid(shapes.geometries())], np.array(sorted(errors), np.int64))
    if len(again):
        settled, settle_errors = each(_settle, geometries[again])
        faults += [(int(again[position]), _reason("snapping", error)) for position, error in settle_errors.items()]
        snapped[again] = settled
        shapes, left = _snapped(snapped)
    return _oriented(shapes, _areas(shapes)), left, faults


def _snapped(geometries: Geometries) -> tuple[Shapes, Ints]:
    """Polygons on whole units as shapes, and which each is."""
    shapes, left = shapes_of(geometries, POLYGON)
    shapes, still = _without_collapsed(_round(shapes))
    return shapes, left[still]


def _mend(geometries: Geometries) -> Geometries:
    """Make polygons valid and nothing but polygons."""
    return shapely.make_valid(geometries, method="structure", keep_collapsed=False)


def _settle(geometries: Geometries) -> Geometries:
    """Round and mend in turn until rounding breaks nothing any more.

    Raises:
        ValueError: One is still broken after `SETTLE_ROUNDS`.
    """
    for _ in range(SETTLE_ROUNDS):
        rounded = shapely.transform(geometries, np.rint)
        if shapely.is_valid(rounded).all():
            return rounded
        geometries = _mend(rounded)
    raise ValueError(f"still invalid after {SETTLE_ROUNDS} rounds: {shapely.is_valid_reason(rounded[0])}")


def _round(shapes: Shapes) -> Shapes:
    """Round to whole units and leave out vertices that repeat the one before them in their ring."""
    xy = np.rint(shapes.xy)
    keep = np.empty(len(xy), np.bool_)
    if len(keep):
        np.any(xy[1:] != xy[:-1], axis=1, out=keep[1:])
        keep[shapes.points[:-1]] = True
    shapes = shapes.moved(xy)
    return shapes if keep.all() else shapes.keep_points(keep)


def _without_collapsed(shapes: Shapes) -> tuple[Shapes, Ints]:
    """Closed rings that still enclose something, a shell's holes going with it; and which items are left."""
    if not len(shapes):
        return shapes, np.zeros(0, np.int64)
    starts = shapes.points[:-1]
    size = np.maximum.reduceat(shapes.xy, starts) - np.minimum.reduceat(shapes.xy, starts)
    keep = (np.diff(shapes.points) > 3) & (size > 0).all(axis=1)
    if keep.all():
        return shapes, np.arange(len(shapes))
    shell_of = np.maximum.accumulate(np.where(shapes.shell, np.arange(len(keep)), 0))
    return shapes.keep_rings(keep & keep[shell_of])


def _areas(shapes: Shapes) -> Floats:
    """Twice the signed area of each closed ring, positive when clockwise on screen (surveyor's formula, y down)."""
    if not len(shapes):
        return np.zeros(0)
    xy = shapes.xy
    cross = np.empty(len(xy))
    cross[:-1] = xy[:-1, 0] * xy[1:, 1] - xy[1:, 0] * xy[:-1, 1]
    # The last coordinate of a ring closes it: what it has with the next ring is no edge.
    cross[shapes.points[1:] - 1] = 0.0
    return np.add.reduceat(cross, shapes.points[:-1])


def _convex(shapes: Shapes, area: Floats) -> Bools:
    """Which items are surely valid: a single ring that turns one way only, and once around.

    Most buildings are. The test costs a tenth of what building a geometry and asking for its validity does.
    """
    xy, points = shapes.xy, shapes.points
    edge = np.empty_like(xy)
    edge[:-1] = xy[1:] - xy[:-1]
    last = points[1:] - 1
    edge[last] = edge[points[:-1]]
    # The edge after each edge of a ring; the place of the closing coordinate repeats the first edge.
    turn = np.zeros(len(xy))
    turn[:-1] = edge[:-1, 0] * edge[1:, 1] - edge[:-1, 1] * edge[1:, 0]
    turn[last] = np.repeat(0.0, len(last))
    sign = np.sign(area)
    straight = turn * np.repeat(sign, np.diff(points)) > 0
    straight[last] = True
    # Strictly convex at every corner, and x goes back and forth once: no ring winds twice.
    forth = np.zeros(len(xy), np.int64)
    rises = edge[:, 0] > 0
    forth[:-1] = rises[1:] != rises[:-1]
    forth[last] = 0
    starts = points[:-1]
    good = np.logical_and.reduceat(straight, starts) & (np.add.reduceat(forth, starts) <= 2) & (sign != 0)
    single = np.diff(shapes.rings) == 1
    return single & good[shapes.rings[:-1]]


def _oriented(shapes: Shapes, area: Floats) -> Shapes:
    """Shells to positive, holes to negative area; a ring that turns the wrong way is reversed from its first vertex."""
    wrong = (area > 0) != shapes.shell
    if not wrong.any():
        return shapes
    lengths = np.diff(shapes.points)
    starts = shapes.points[:-1]
    position = spread(starts, lengths)
    turned = np.repeat(wrong, lengths)
    mirror = np.repeat(starts + shapes.points[1:] - 1, lengths)
    position[turned] = mirror[turned] - position[turned]
    return shapes.moved(shapes.xy[position])


def _records(geometries: Geometries, tolerance: Floats) -> Any:
    records = np.empty(len(geometries), [("geometry", object), ("tolerance", float)])
    records["geometry"] = geometries
    records["tolerance"] = tolerance
    return records


def _reason(step: str, error: Exception) -> str:
    return f"{step}: {error}"
