"""`geo-assets shadow`: what another recipe or other libraries would change, before anybody sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from geo_assets.cli.answers import CliError, err, escape, open_home, out

if TYPE_CHECKING:
    from geo_assets.services.shadow import Report
    from geo_assets.stack import Stack

DIFFERS = 3
"""Exit code where anything differs; 1 and 2 are errors, 0 is nothing."""

ROWS = 15


def shadow(
    region: Path = typer.Option(None, help="GeoJSON file with the region's polygons (EPSG:4326)."),
    bbox: str = typer.Option(None, help="west,south,east,north in degrees; west above east crosses the date line."),
    cells: list[str] = typer.Option(None, "--h3", help="H3 cell; several times for several."),
    feature: str = typer.Option(None, help="An area in the store: SOURCE:ID or LAYER/ATTRIBUTE=VALUE."),
    zooms: str = typer.Option(None, help="Zooms, such as 0-14; default: all that the layers are built for."),
    sample: int = typer.Option(None, min=1, help="So many tiles of it; default: all of a region, 500 of the map."),
    layers: Path = typer.Option(None, help="YAML with other layers."),
    engine: str = typer.Option(None, help="Another engine: numpy or st_asmvt."),
    python: Path = typer.Option(None, help="Interpreter with other libraries, such as other-venv/bin/python."),
    worst: int = typer.Option(6, min=0, help="Tiles in the picture."),
    html: Path = typer.Option(None, help="Write the page with the pictures to this file."),
    as_json: bool = typer.Option(False, "--json", help="Print the whole report as JSON for programs."),
    keep: bool = typer.Option(True, help="Leave what was built in the tile store for a week, below shadow/."),
    cap: int = typer.Option(None, min=1, help="Tiles a region may have (env GEO_ASSETS_MANIFEST_CAP, default 20,000)."),
    show: bool = typer.Option(False, "--list", help="List shadows in the tile store, and build none."),
    remove: str = typer.Option(None, help="Remove a shadow, or `all`, and build none."),
) -> None:
    """Build a sample or a region by another recipe beside the map, and tell which tiles differ and how.

    Nothing of the map changes. Exit code 0: no tile differs; 3: some do; 1 and 2: it could not be said. Example:

        geo-assets shadow --layers new-layers.yaml --bbox 24.93,60.16,24.96,60.18 --zooms 12-16 --html diff.html
    """
    from geo_assets.services.regions import RegionError
    from geo_assets.services.shadow import ShadowError, html_of
    from geo_assets.services.shadow import shadow as build_shadow
    from geo_assets.services.tileset.regions import region_of

    if layers and not layers.is_file():
        raise CliError(f"--layers: {layers} is no file")
    if html and not html.absolute().parent.is_dir():
        raise CliError(f"--html: there is no folder {html.absolute().parent}")
    with open_home() as stack:
        try:
            if show or remove:
                _keeping(stack, remove)
                return
            wanted = region_of(
                stack, region=region, bbox=bbox, cells=cells or (), feature=feature, zooms=zooms, cap=cap
            )
            with _bar() as bar:
                task = bar.add_task("shadow", total=None)
                report = build_shadow(
                    stack,
                    wanted,
                    sample=sample,
                    layers_file=layers.absolute() if layers else None,
                    engine=engine,
                    python=_found(python) if python else None,
                    worst=worst,
                    keep=keep,
                    progress=lambda done, total: bar.update(task, completed=done, total=total),
                )
        except (ShadowError, RegionError) as fault:
            raise CliError(str(fault)) from None
        place = f"{stack.settings.home / 'tiles'}/" if stack.settings.tile_store_url is None else ""
    if html:
        html.write_text(html_of(report, worst), encoding="utf-8")
    if as_json:
        out.print(json.dumps(report.plain(), ensure_ascii=False), soft_wrap=True, markup=False)
    else:
        _tell(report, html, place)
    if report.differs:
        raise typer.Exit(DIFFERS)


def _found(python: Path) -> Path:
    """Not resolved: a virtual environment's interpreter is a link, and what it is called says which one it is."""
    return python.absolute() if "/" in str(python) or python.exists() else python


def _bar() -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=err
    )


def _keeping(stack: Stack, remove: str | None) -> None:
    from geo_assets.services import shadow
    from geo_assets.services.status import moment

    found = shadow.kept(stack.tiles)
    if remove is None:
        for one in found:
            out.print(f"{one.id}  {moment(one.newest_ms)}  {one.objects:,} objects  {one.bytes:,} bytes")
        if not found:
            out.print("no shadows")
        return
    wanted = [one.id for one in found] if remove == "all" else [remove]
    removed = sum(shadow.remove(stack.tiles, one) for one in wanted)
    if not removed and remove != "all":
        raise CliError(f"there is no shadow {remove}; geo-assets shadow --list lists them")
    out.print(f"{removed:,} objects removed")


def _tell(report: Report, html: Path | None, place: str) -> None:
    from rich.table import Table

    colour = "yellow" if report.differs else "green"
    out.print(
        f"[bold {colour}]{report.summary()}[/]  ({escape(report.region)}, {report.seconds:.1f} s)", soft_wrap=True
    )
    for name, side in (("before", report.before), ("after", report.after)):
        versions = ", ".join(f"{key} {value}" for key, value in side["libraries"].items())
        out.print(f"  {name:<6} recipe {side['recipe'][:12]}  {versions}", soft_wrap=True, markup=False)
    if report.out_of_date:
        out.print(f"  {report.out_of_date:,} tiles are out of date: compared with what they would be now")
    for what, lines in (("features cannot be encoded", report.left_out), ("rules are broken", report.faults)):
        if lines:
            out.print(f"  [red]{len(lines):,} {what}[/red], such as: {escape(lines[0][:200])}", soft_wrap=True)
    if report.differs:
        table = Table(box=None, padding=(0, 2), pad_edge=False)
        for column in ("tile", "layer", "added", "removed", "changed", "bytes", "hash", "map"):
            table.add_column(column, justify="right" if column in ("added", "removed", "changed", "bytes") else "left")
        for one in report.differing[:ROWS]:
            rows = [
                (name, *(str(kinds[kind]) for kind in ("added", "removed", "changed")))
                for name, kinds in one.layers.items()
            ]
            for index, row in enumerate(rows or [("; ".join(one.notes), "", "", "")]):
                hashes = f"{(one.before_hash or 'empty')[:8]} → {(one.after_hash or 'empty')[:8]}"
                sizes = f"{one.before_bytes:,} → {one.after_bytes:,}"
                cells = (one.tile, *row, sizes, hashes, one.map) if index == 0 else ("", *row, "", "", "")
                table.add_row(*map(escape, cells))
        out.print(table)
        if len(report.differing) > ROWS:
            out.print(f"… and {len(report.differing) - ROWS:,} more (--json tells all)")
    if html:
        out.print(f"pictures: {escape(str(html))}", soft_wrap=True)
    elif report.prefix:
        out.print(f"pictures: {escape(place)}{report.prefix}report.html", soft_wrap=True)
