"""Geometry to grid: shapes in world fractions become clipped, valid, integer shapes in the units of their tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from geo_assets.tiles.encode.ragged import Bools, Floats, Ints, sums, where
from geo_assets.tiles.encode.shapes import (
    FEW,
    LINE,
    POINT,
    POLYGON,
    Geometries,
    Shapes,
    concatenate,
    each,
    few_with,
    geos,
    shapes_of,
)

SIMPLIFIED_FROM = {LINE: 3, POLYGON: 6}
"""Coordinates from which a line or polygon is simplified: a line of two and a ring of four corners keep them all."""

THINNED_FROM = 32
"""Coordinates from which a ring or line is thinned before it is clipped; below, clipping is as cheap."""

DENTS_FROM = 48
"""Polygons from which it pays to look for a single inward corner before the library is asked."""

SETTLE_ROUNDS = 8
"""How often a polygon that cannot be snapped is rounded and mended; spikes settle in one or two."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What of the pairs shows: shapes with integer coordinates, y down, rings unclosed.

    `turned` says which rings have to be reversed: exterior ones turn clockwise on screen, interior ones the other way.
    `pair[i]` is the pair that item i draws. `faults` are pairs that could not be drawn, and why.
    """

    shapes: Shapes
    turned: Bools
    pair: Ints
    faults: list[tuple[int, str]]


def simplify(shapes: Shapes, index: Ints, tolerance: Floats, zoom: Ints | int) -> tuple[Shapes, Ints]:
    """Simplify items for a zoom, before any clipping: neighbouring tiles draw the same line.

    Args:
        shapes: Items in fractions of the world's side.
        index: Items that show at this zoom, or each at its own.
        tolerance: (index) pixels of a 256-pixel tile, as in `Layer.simplify`.
        zoom: Zoom of the tiles, or (index) of each.

    Returns:
        The simplified items, and which of `index` they stand for; the others need no simplification.
    """
    vertices = np.diff(shapes.item_points())[index]
    kind = shapes.kind[index]
    enough = np.where(kind == POLYGON, SIMPLIFIED_FROM[POLYGON], SIMPLIFIED_FROM[LINE])
    wanted = where((kind != POINT) & (tolerance > 0) & (vertices >= enough))
    if not len(wanted):
        return Shapes.empty(), wanted
    part = shapes.take(index[wanted])
    # Pixels of this zoom: a power of two, so that the way there and back changes no bit.
    of_zoom = zoom if isinstance(zoom, int) else zoom[wanted]
    part = part.moved(part.xy * _pixels(part, of_zoom))
    flat = where(_has_flat_corner(part, tolerance[wanted]))
    if not len(flat):
        return Shapes.empty(), flat
    if len(flat) < len(wanted):
        wanted, part = wanted[flat], part.take(flat)
    geometries = part.geometries()
    position = np.arange(len(wanted))
    simple, _ = each(
        lambda of: geos.simplify(of["geometry"], of["tolerance"], preserve_topology=True),
        _records(geometries, tolerance[wanted]),
    )
    result: list[Shapes] = []
    of: list[Ints] = []
    for wanted_kind in (LINE, POLYGON):
        this = where(part.kind == wanted_kind)
        if len(this):
            shape, owner = shapes_of(simple[this], wanted_kind)
            result.append(shape)
            of.append(position[this[owner]])
    shape, owners = concatenate(result), wanted[np.concatenate(of)]
    return shape.moved(shape.xy / _pixels(shape, zoom if isinstance(zoom, int) else zoom[owners])), owners


def _pixels(shapes: Shapes, zoom: Ints | int) -> Floats | float:
    """Pixels a world's side at a zoom, or for each coordinate at its item's."""
    if isinstance(zoom, int):
        return float(256 << zoom)
    return np.ldexp(256.0, zoom.astype(np.int32)).repeat(np.diff(shapes.item_points()))[:, np.newaxis]


def _has_flat_corner(shapes: Shapes, tolerance: Floats) -> Bools:
    """Which items have a vertex within two tolerances of the line through its neighbours; others keep all they have.

    The corners of buildings are sharp: this spares most of them a simplification that would change nothing.
    """
    x, y = shapes.xy.T.copy()
    edge_x, edge_y = x[1:] - x[:-1], y[1:] - y[:-1]
    across_x, across_y = x[2:] - x[:-2], y[2:] - y[:-2]
    limit = (2 * tolerance).repeat(np.diff(shapes.item_points()))
    flat = np.zeros(len(x), np.bool_)
    turn = edge_x[:-1] * edge_y[1:] - edge_y[:-1] * edge_x[1:]
    flat[1:-1] = turn * turn <= limit[1:-1] * limit[1:-1] * (across_x * across_x + across_y * across_y)
    # The ends of a ring or line have their neighbours elsewhere: they stay in any case.
    flat[shapes.points[:-1]] = False
    flat[shapes.points[1:] - 1] = False
    return np.logical_or.reduceat(flat, shapes.item_points()[:-1])


class Draw(Protocol):
    """The step that another engine may take instead of `draw`; the arguments are the same."""

    def __call__(self, shapes: Shapes, item: Ints | None, place: Place, *, buffer: int) -> Drawn:
        """Draw items into tiles."""
        ...


def draw(shapes: Shapes, item: Ints | None, place: Place, *, buffer: int) -> Drawn:
    """Draw items into tiles.

    Args:
        shapes: Items in fractions of the world's side, y south.
        item: (pairs) which item a pair draws; None when each item is drawn once, in their order.
        place: Where the tiles of the pairs lie.
        buffer: Units by which a tile reaches over its edge.
    """
    extent = place.extent
    if item is not None:
        shapes = shapes.take(item)
    shapes = place.moved(shapes)
    low, high = shapes.bounds()
    inside = _both((low >= -buffer) & (high <= extent + buffer))
    faults: list[tuple[int, str]] = []
    if inside.all():
        exact, pair = shapes, np.arange(len(inside))
    else:
        crossing = where(_both((high >= -buffer) & (low <= extent + buffer)) & ~inside)
        exact, pair, faults = _clipped(shapes, where(inside), crossing, -buffer, extent + buffer)
    drawn, turned, left, broken = _rounded(exact)
    pairs = pair[left]
    if len(broken):
        source = pair[broken]
        snapped, snapped_turned, left, reasons = _snap(
            exact.take(broken), shapes.take(source), ~inside[source], -buffer, extent + buffer
        )
        turned = np.concatenate([turned, snapped_turned]) if len(drawn) else snapped_turned
        drawn = concatenate([drawn, snapped])
        pairs = np.concatenate([pairs, source[left]])
        faults += [(int(source[position]), reason) for position, reason in reasons]
    return Drawn(drawn, turned, pairs, faults)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the tiles of pairs lie: units a world's side, and units from its north-west corner.

    A batch of one zoom has one scale, a single tile one corner: then they are one number and not one a pair.
    """

    extent: int
    """Units a side of a tile."""
    scale: Floats | float
    corner: Floats
    """(2) or (pairs, 2)."""

    @classmethod
    def at(cls, zoom: int, column: int, row: int, extent: int) -> Place:
        """All pairs in one tile."""
        return cls(extent, float(extent << zoom), np.array((float(column) * extent, float(row) * extent)))

    @classmethod
    def of(cls, place: Ints, extent: int) -> Place:
        """Each pair in its own tile; `place` is (pairs, 3), their zooms, columns and rows."""
        if not len(place):
            return cls.at(0, 0, 0, extent)
        same = (place == place[0]).all(axis=0)
        zoom, column, row = place[0].tolist()
        if same.all():
            return cls.at(zoom, column, row, extent)
        scale = float(extent << zoom) if same[0] else np.ldexp(float(extent), place[:, 0].astype(np.int32))
        return cls(extent, scale, (place[:, 1:] * extent).astype(np.float64))

    def moved(self, shapes: Shapes) -> Shapes:
        """Items, one a pair, in units of their tiles."""
        corner, scale = self.corner, self.scale
        if corner.ndim > 1:
            bounds = shapes.item_points()
            lengths = bounds[1:] - bounds[:-1]
            corner = corner.repeat(lengths, axis=0)
            if isinstance(scale, np.ndarray):
                scale = scale.repeat(lengths)[:, np.newaxis]
        xy = shapes.xy * scale
        xy -= corner
        return shapes.moved(xy)


def _clipped(
    shapes: Shapes, inside: Ints, crossing: Ints, low: float, high: float
) -> tuple[Shapes, Ints, list[tuple[int, str]]]:
    """What lies inside and what is left of what crosses the square low..high, of which items, and faults by item."""
    if len(shapes) <= FEW and len(crossing) and not (shapes.kind[crossing] == POINT).any():
        try:
            geometries = geos.clip_by_rect(_thin(shapes, low, high).geometries(crossing), low, low, high, high)
        except geos.errors.GEOSException:
            pass
        else:
            return *few_with(shapes, inside, crossing, geometries), []
    exact = shapes.take(inside)
    if not len(crossing):
        return exact, inside, []
    clipped, of, faults = _clip(shapes.take(crossing), low, high)
    return (
        concatenate([exact, clipped]),
        np.concatenate([inside, crossing[of]]),
        [(int(crossing[position]), reason) for position, reason in faults],
    )


def _clip(shapes: Shapes, low: float, high: float) -> tuple[Shapes, Ints, list[tuple[int, str]]]:
    """Clip items to the square low..high: what is left, of which item, and what could not be clipped."""
    result: list[Shapes] = []
    owners: list[Ints] = []
    faults: list[tuple[int, str]] = []
    of = np.arange(len(shapes.kind))
    point = shapes.kind == POINT
    if point.any():
        part = shapes.take(where(point))
        part = part.keep_points(_both((part.xy >= low) & (part.xy <= high)))
        part, left = part.keep_rings(part.lengths() > 0)
        result.append(part)
        owners.append(where(point)[left])
        of = where(~point)
        shapes = shapes.take(of)
    if len(of):
        geometries = _thin(shapes, low, high).geometries()
        clipped, errors = each(lambda these: geos.clip_by_rect(these, low, low, high, high), geometries)
        if errors:
            failed = np.array(sorted(errors))
            clipped[failed], still = each(
                # Areas alone: a mended ring may leave a spike beside them, and no overlay takes both at once.
                lambda these: geos.intersection(
                    geos.make_valid(these, method="structure", keep_collapsed=False), geos.box(low, low, high, high)
                ),
                shapes.take(failed).geometries(),
            )
            faults += [(int(of[failed[position]]), _reason("clipping", error)) for position, error in still.items()]
        part, owner = shapes_of(clipped)
        # What is of another dimension, such as the side at which a polygon touches the square, is no part of it.
        same = part.kind == shapes.kind[owner]
        if not same.all():
            part, owner = part.take(where(same)), owner[same]
        result.append(part)
        owners.append(of[owner])
    return concatenate(result), np.concatenate(owners), faults


def _thin(shapes: Shapes, low: float, high: float) -> Shapes:
    """Leave out coordinates that cannot matter inside the square low..high.

    A coordinate whose neighbours on both sides lie in the same outer field (left, above left, above, …) as itself goes:
    the line that replaces it stays in that field, and no edge that meets the square changes. This turns a coastline of
    a million vertices into the few that the tile sees, for the price of some comparisons.
    """
    long = shapes.lengths() >= THINNED_FROM
    if not long.any():
        return shapes
    side = (shapes.xy > high).view(np.int8) - (shapes.xy < low).view(np.int8)
    field = side[:, 0] + 3 * side[:, 1]
    same = field[1:] == field[:-1]
    keep = np.ones(len(field), np.bool_)
    keep[1:-1] = ~(same[1:] & same[:-1]) | (field[1:-1] == 0)
    keep[shapes.points[:-1]] = True
    keep[shapes.points[1:] - 1] = True
    # A closed ring needs four coordinates; one that lies in a single field is kept as it is.
    whole = ~long | (sums(keep, shapes.points) < 4)
    keep |= whole.repeat(shapes.lengths())
    return shapes.keep_points(keep)


def _rounded(shapes: Shapes) -> tuple[Shapes, Bools, Ints, Ints]:
    """Round items to whole units.

    Returns:
        What is good then, polygon rings unclosed; which of its rings turn the wrong way; which items they are; and
        which polygons rounding broke. What collapsed (a line that became a point, a ring without height or width) is
        in neither.
    """
    shapes, left = _without_collapsed(_whole(shapes))
    polygon = shapes.kind == POLYGON
    if not polygon.any():
        return shapes, np.zeros(len(shapes.shell), np.bool_), left, left[:0]
    area, convex = _measure(shapes)
    good = ~polygon | convex
    unsure = where(~good)
    if len(unsure) >= DENTS_FROM:
        single = unsure[(shapes.rings[unsure + 1] - shapes.rings[unsure]) == 1]
        if len(single):
            good[single] = one_dent(shapes.take(single), area[shapes.rings[single]])
            unsure = where(~good)
    if len(unsure):
        good[unsure] = geos.is_valid(shapes.geometries(unsure))
    turned = ((area > 0) != shapes.shell) & polygon.repeat(shapes.rings[1:] - shapes.rings[:-1])
    if good.all():
        return shapes, turned, left, left[:0]
    valid = where(good)
    ring = good.repeat(shapes.rings[1:] - shapes.rings[:-1])
    return shapes.take(valid), turned[ring], left[valid], left[~good]


def _snap(
    unrounded: Shapes, whole: Shapes, cut: Bools, low: float, high: float
) -> tuple[Shapes, Bools, Ints, list[tuple[int, str]]]:
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
    bad = where(~geos.is_valid(geometries))
    faults: list[tuple[int, str]] = []
    if len(bad):
        box = geos.box(low, low, high, high)
        mended, errors = each(_mend, whole.take(bad).geometries())
        crossing = where(cut[bad] & (mended != None))  # noqa: E711 - elementwise
        if len(crossing):
            pieces, cut_errors = each(lambda these: geos.intersection(these, box), mended[crossing])
            mended[crossing] = _areas(pieces)
            errors |= {int(crossing[position]): error for position, error in cut_errors.items()}
        geometries[bad] = mended
        faults += [(int(bad[position]), _reason("repair", error)) for position, error in errors.items()]
    snapped, errors = each(lambda these: geos.set_precision(these, 1.0), geometries)
    shapes, left = _snapped(snapped)
    # Snapping itself may raise, or leave what further rounding breaks, on spikes thinner than a unit.
    again = np.union1d(left[~geos.is_valid(shapes.geometries())], np.array(sorted(errors), np.int64))
    if len(again):
        settled, settle_errors = each(_settle, geometries[again])
        faults += [(int(again[position]), _reason("snapping", error)) for position, error in settle_errors.items()]
        snapped[again] = settled
        shapes, left = _snapped(snapped)
    area, _ = _measure(shapes)
    return shapes, (area > 0) != shapes.shell, left, faults


def _snapped(geometries: Geometries) -> tuple[Shapes, Ints]:
    """Polygons on whole units as shapes, and which each is."""
    shapes, left = shapes_of(geometries, POLYGON)
    shapes, still = _without_collapsed(_whole(shapes))
    return shapes, left[still]


def _mend(geometries: Geometries) -> Geometries:
    """Make polygons valid and nothing but polygons."""
    return geos.make_valid(geometries, method="structure", keep_collapsed=False)


def _areas(geometries: Geometries) -> Geometries:
    """What of each are polygons, as one geometry; None where nothing is.

    In a collection, which is what a polygon and the line or point at which it touches the square are, the polygons may
    share sides: what is asked to be valid, and snapped, is to be a multipolygon.
    """
    found: Geometries = np.full(len(geometries), None, dtype=object)
    shapes, of = shapes_of(geometries, POLYGON)
    if len(of):
        found[of] = shapes.geometries()
    return found


def _settle(geometries: Geometries) -> Geometries:
    """Round and mend in turn until rounding breaks nothing any more.

    Raises:
        ValueError: One is still broken after `SETTLE_ROUNDS`.
    """
    rounded: Geometries = geometries
    for _ in range(SETTLE_ROUNDS):
        rounded = geos.transform(geometries, np.rint)
        if geos.is_valid(rounded).all():
            return rounded
        geometries = _mend(rounded)
    raise ValueError(f"still invalid after {SETTLE_ROUNDS} rounds: {geos.is_valid_reason(rounded[0])}")


def _whole(shapes: Shapes) -> Shapes:
    """Round to whole units, open the rings of polygons, and leave out what repeats.

    A vertex goes when it equals the one *after* it: so the vertices repeated just before a ring's end go with the last
    one, which only closes the ring. Of an item's points each place stays once.
    """
    xy = np.rint(shapes.xy)
    shapes = shapes.moved(xy)
    if not len(xy):
        return shapes
    keep = np.empty(len(xy), np.bool_)
    np.not_equal(xy[1:, 0], xy[:-1, 0], out=keep[:-1])
    keep[:-1] |= xy[1:, 1] != xy[:-1, 1]
    open_ = shapes.kind != POLYGON
    if len(shapes.shell) > len(shapes.kind):
        open_ = open_.repeat(shapes.rings[1:] - shapes.rings[:-1])
    keep[shapes.points[1:] - 1] = open_
    several = (shapes.kind == POINT) & (np.diff(shapes.item_points()) > 1)
    if several.any():
        _once(shapes, several, keep)
    return shapes if keep.all() else shapes.keep_points(keep)


def _once(shapes: Shapes, of: Bools, keep: Bools) -> None:
    """Of equal points of one item, keep the first."""
    bounds = shapes.item_points()
    lengths = np.diff(bounds)
    position = where(of.repeat(lengths))
    owner = np.arange(len(shapes)).repeat(lengths)[position]
    xy = shapes.xy[position]
    order = np.lexsort((xy[:, 1], xy[:, 0], owner))
    same = np.zeros(len(order), np.bool_)
    same[1:] = (owner[order[1:]] == owner[order[:-1]]) & (xy[order[1:]] == xy[order[:-1]]).all(axis=1)
    keep[position] = True
    keep[position[order[same]]] = False


def _without_collapsed(shapes: Shapes) -> tuple[Shapes, Ints]:
    """Without lines of a single vertex and rings that enclose nothing, a shell's holes going with it.

    Returns:
        The items that still are something, and which they are.
    """
    count = len(shapes.kind)
    if not count:
        return shapes, np.arange(0)
    kind = shapes.kind
    if len(shapes.shell) > count:
        kind = kind.repeat(shapes.rings[1:] - shapes.rings[:-1])
    # A point has one coordinate at least, a line two, an unclosed ring three.
    keep = shapes.lengths() >= kind
    if keep.all():
        starts = shapes.points[:-1]
        size = np.maximum.reduceat(shapes.xy, starts) - np.minimum.reduceat(shapes.xy, starts)
        keep = (size > 0).all(axis=1) | (kind != POLYGON)
        if keep.all():
            return shapes, np.arange(count)
    shell_of = np.maximum.accumulate(np.where(shapes.shell, np.arange(len(keep)), 0))
    shapes, left = shapes.keep_rings(keep & keep[shell_of])
    # What is left is looked at again: of rings with too few vertices no size was taken.
    again, still = _without_collapsed(shapes)
    return again, left[still]


def _measure(shapes: Shapes) -> tuple[Floats, Bools]:
    """Twice the signed area of each unclosed ring, and which items are surely valid polygons.

    The area is positive when the ring turns clockwise on screen (surveyor's formula, y down). Surely valid is a single
    ring that turns one way only, and once around, as most buildings do; to see that costs a tenth of building a
    geometry and asking for its validity.
    """
    if not len(shapes.kind):
        return np.zeros(0), np.zeros(0, np.bool_)
    x, y = shapes.xy.T.copy()
    starts, last = shapes.points[:-1], shapes.points[1:] - 1

    def following(values: Floats) -> Floats:
        result = np.empty_like(values)
        result[:-1] = values[1:]
        result[last] = values[starts]
        return result

    next_x, next_y = following(x), following(y)
    edge_x, edge_y = next_x - x, next_y - y
    area = np.add.reduceat(x * next_y - next_x * y, starts)
    turn = edge_x * following(edge_y) - edge_y * following(edge_x)
    sharpest = np.where(area > 0, np.minimum.reduceat(turn, starts), -np.maximum.reduceat(turn, starts))
    # Strictly convex at every corner, and x goes back and forth once: no ring winds twice.
    rises = edge_x > 0
    change = np.empty(len(x), np.int64)
    np.not_equal(rises[1:], rises[:-1], out=change[:-1], casting="unsafe")
    change[last] = rises[last] != rises[starts]
    good = (sharpest > 0) & (np.add.reduceat(change, starts) == 2)
    if len(good) == len(shapes.kind):
        return area, good
    return area, (shapes.rings[1:] - shapes.rings[:-1] == 1) & good[shapes.rings[:-1]]


def one_dent(shapes: Shapes, area: Floats) -> Bools:
    """Which polygons of a single ring have one inward corner that sees all the others, as an L does: those are valid.

    Seen from that corner, each edge that does not end there turns on strictly in the direction of the ring, by less
    than half a turn. The inner angle of an inward corner is between a half and a whole turn, so all edges together are
    once around at most, or one and a half times at least; the latter cross the corner's horizontal three times.

    Args:
        shapes: Polygons of one unclosed ring each, on whole units.
        area: (polygons) twice the signed area, as measured.
    """
    x, y = shapes.xy.T.copy()
    starts, lengths = shapes.points[:-1], shapes.lengths()
    after = np.arange(1, len(x) + 1)
    after[shapes.points[1:] - 1] = starts
    sign = np.where(area > 0, 1.0, -1.0).repeat(lengths)
    edge_x, edge_y = x[after] - x, y[after] - y
    turn = (edge_x * edge_y[after] - edge_y * edge_x[after]) * sign
    inward = turn <= 0
    # The corner between an edge and the next; where there are several or none, it sees no other and the ring fails.
    corner = after[np.maximum.reduceat(np.where(inward, np.arange(len(x)), 0), starts)]
    from_x, from_y = x - x[corner].repeat(lengths), y - y[corner].repeat(lengths)
    onward = (from_x * from_y[after] - from_y * from_x[after]) * sign > 0
    below = (from_y > 0) | ((from_y == 0) & (from_x > 0))
    crossings = np.add.reduceat((onward & (below != below[after])).astype(np.int64), starts)
    return (
        (np.add.reduceat(inward.astype(np.int64), starts) == 1)
        # A corner that is straight, or turns back, is no inward one.
        & (np.minimum.reduceat(turn, starts) < 0)
        & (lengths - np.add.reduceat(onward.astype(np.int64), starts) == 2)
        & (crossings <= 2)
    )


def _both(xy: Bools) -> Bools:
    return xy[:, 0] & xy[:, 1]


def _records(geometries: Geometries, tolerance: Floats) -> Any:
    records = np.empty(len(geometries), [("geometry", object), ("tolerance", float)])
    records["geometry"] = geometries
    records["tolerance"] = tolerance
    return records


def _reason(step: str, error: Exception) -> str:
    return f"{step}: {error}"
