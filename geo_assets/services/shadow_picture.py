"""Pictures of tiles that differ: before, after and the difference side by side, as SVG and as a page of HTML.

Drawn by hand from decoded features; what is smaller than a pixel becomes a dot, so that a picture stays small.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from geo_assets.tiles.decode import DecodedFeature, DecodedLayer, decode
from geo_assets.tiles.difference import feature_id

if TYPE_CHECKING:
    from geo_assets.tiles.difference import TileDifference

SIDE = 300
"""Pixels of a panel."""

GAP = 14
HEAD = 40
MOST_FEATURES = 6_000
"""Features drawn in a panel; the caption says how many were left out."""

ADDED, REMOVED, VALUES, SAME = "#178a3c", "#d2233c", "#2456c9", "#c3c7cc"
"""Green, red, blue and grey. A feature in the same place with other attributes is neither new nor gone."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One tile that differs."""

    title: str
    caption: str
    difference: TileDifference


def svg(pictures: Sequence[Picture], *, steps: int = 2) -> str:
    """All pictures below each other, as one SVG; corners lie on `steps` places a pixel."""
    width, height = 3 * SIDE + 4 * GAP, len(pictures) * (SIDE + HEAD + GAP) + GAP
    rows = "".join(_row(picture, GAP + index * (SIDE + HEAD + GAP), steps) for index, picture in enumerate(pictures))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="12"><rect width="100%" height="100%" fill="#ffffff"/>'
        f"{rows}</svg>"
    )


def page(title: str, summary: Sequence[tuple[str, str]], pictures: Sequence[Picture]) -> str:
    """A page of its own: what was compared, and the pictures."""
    facts = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in summary)
    shown = "".join(f"<figure>{svg([picture])}</figure>" for picture in pictures)
    nothing = "" if pictures else "<p>No tile differs.</p>"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>'
        "body{font:14px system-ui,sans-serif;margin:2rem;color:#1d2126;background:#fff}"
        "th{text-align:left;padding:.15rem 1rem .15rem 0;font-weight:600;vertical-align:top}"
        "td{font-variant-numeric:tabular-nums}figure{margin:1.5rem 0;overflow-x:auto}"
        "figure svg{border:1px solid #e2e5e9;border-radius:6px}</style>"
        f"<h1>{escape(title)}</h1><table>{facts}</table>{nothing}{shown}</html>"
    )


def _row(picture: Picture, top: int, steps: int) -> str:
    found = picture.difference
    before, after = decode(found.before), decode(found.after)
    panels = (
        ("before", _map(before, steps)),
        ("after", _map(after, steps)),
        ("difference", _difference(found, before, after, steps)),
    )
    parts = [
        f'<text x="{GAP}" y="{top + 13}" font-weight="600" font-size="14">{escape(picture.title)}</text>',
        f'<text x="{GAP}" y="{top + 30}" fill="#555c64">{escape(picture.caption)}</text>',
    ]
    for index, (name, (body, left_out)) in enumerate(panels):
        x, y = GAP + index * (SIDE + GAP), top + HEAD
        label = f"{name}, {left_out:,} features not drawn" if left_out else name
        parts.append(
            f'<svg x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" viewBox="0 0 {SIDE} {SIDE}">'
            f'<rect width="{SIDE}" height="{SIDE}" fill="#fafaf8"/>{body}'
            f'<rect width="{SIDE}" height="{SIDE}" fill="none" stroke="#b9bec4"/>'
            f'<text x="6" y="{SIDE - 7}" fill="#1d2126" stroke="#ffffff" stroke-width="3" paint-order="stroke">'
            f"{escape(label)}</text></svg>"
        )
    return "".join(parts)


def _map(layers: Sequence[DecodedLayer], steps: int) -> tuple[str, int]:
    left = MOST_FEATURES
    parts: list[str] = []
    for layer in layers:
        shown = layer.features[:left]
        left -= len(shown)
        parts.append(_drawn(shown, layer.extent, _colour(layer.name), 0.35, 0.8, steps))
    return "".join(parts), sum(len(layer.features) for layer in layers) - (MOST_FEATURES - left)


def _difference(
    found: TileDifference, before: Sequence[DecodedLayer], after: Sequence[DecodedLayer], steps: int
) -> tuple[str, int]:
    """Grey: the same. Red: gone, green: come, and of a feature that moved both. Blue: other attributes alone."""
    extents = {layer.name: layer.extent for layer in before}
    later = {layer.name: layer.extent for layer in after}
    moved = {(change.layer, change.id) for change in found.changes}
    left = MOST_FEATURES
    parts: list[str] = []
    for layer in after:
        same = [feature for feature in layer.features if (layer.name, feature_id(feature)) not in moved][:left]
        left -= len(same)
        parts.append(_drawn(same, layer.extent, SAME, 0.25, 0.5, steps))
    missing = 0
    for changes, extent_of, colour in ((False, extents, REMOVED), (True, later, ADDED)):
        for change in found.changes:
            features = change.after if changes else change.before
            values_alone = change.kind == "changed" and "geometry" not in change.what
            if not features or (values_alone and not changes):
                continue
            if left <= 0:
                missing += len(features)
                continue
            left -= len(features)
            shade = VALUES if values_alone else colour
            parts.append(_drawn(features, extent_of[change.layer], shade, 0.18, 1.4, steps))
    return "".join(parts), missing


def _colour(layer: str) -> str:
    hue = int.from_bytes(hashlib.sha256(layer.encode()).digest()[:2], "big") % 360
    return f"hsl({hue} 55% 42%)"


def _drawn(features: Iterable[DecodedFeature], extent: int, colour: str, fill: float, width: float, steps: int) -> str:
    areas: list[str] = []
    lines: list[str] = []
    dots: dict[str, None] = {}
    for feature in features:
        paths = [_pixels(path, extent, steps) for path in feature.paths]
        if feature.geometry_type == "Point":
            dots.update(dict.fromkeys(f"M{path[0]}h0" for path in paths if path))
            continue
        for path in paths:
            if len(path) == 1:
                dots[f"M{path[0]}h0"] = None
        target = areas if feature.geometry_type == "Polygon" else lines
        drawn = "".join(_path(path, feature.geometry_type == "Polygon") for path in paths if len(path) > 1)
        if drawn:
            target.append(drawn)
    # A feature a path: even-odd holes of one must not punch those of another.
    parts = [f'<path d="{d}" fill-rule="evenodd"/>' for d in areas]
    shapes = f'<g fill="{colour}" fill-opacity="{fill}" stroke="{colour}" stroke-width="{width}">{"".join(parts)}</g>'
    strokes = (
        f'<path d="{"".join(lines)}" fill="none" stroke="{colour}" stroke-width="{width + 0.3:.1f}"/>' if lines else ""
    )
    points = (
        f'<path d="{"".join(dots)}" fill="none" stroke="{colour}" stroke-width="3" stroke-linecap="round"/>'
        if dots
        else ""
    )
    return (shapes if parts else "") + strokes + points


def _pixels(path: Sequence[tuple[int, int]], extent: int, steps: int) -> list[str]:
    """Corners in pixels, rounded to `steps` places each; repeated ones left out."""
    scale = steps * SIDE / extent
    found: list[str] = []
    for x, y in path:
        corner = f"{round(x * scale) / steps:g},{round(y * scale) / steps:g}"
        if not found or corner != found[-1]:
            found.append(corner)
    return found


def _path(corners: list[str], closed: bool) -> str:
    return "M" + "L".join(corners) + ("Z" if closed else "")
