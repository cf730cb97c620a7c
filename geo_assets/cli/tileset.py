"""`geo-assets publish`, `tilesets` and `rollback`: a region of the map as a file that no later edit changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from geo_assets.cli.answers import CliError, err, escape, open_home, out
from geo_assets.cli.shadow import shadow

if TYPE_CHECKING:
    from geo_assets.services.tileset.publishing import Published
    from geo_assets.services.tileset.registry import Tileset, Version
    from geo_assets.stack import Stack

family = typer.Typer(help="Published tilesets: list them, look at one, prune old versions, pin one for a reader.")

MISSING_SHOWN = 20


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(rich_help_panel="Publish")(publish)
    app.command(rich_help_panel="Publish")(rollback)
    app.command(rich_help_panel="Publish")(shadow)
    app.add_typer(family, name="tilesets", rich_help_panel="Publish")


def publish(
    region: Path = typer.Option(None, help="GeoJSON file with the region's polygons (EPSG:4326)."),
    bbox: str = typer.Option(None, help="west,south,east,north in degrees; west above east crosses the date line."),
    cells: list[str] = typer.Option(None, "--h3", help="H3 cell; several times for several."),
    feature: str = typer.Option(None, help="An area in the store: SOURCE:ID or LAYER/ATTRIBUTE=VALUE."),
    zooms: str = typer.Option(None, help="Zooms, such as 0-14; default: all that the layers are built for."),
    name: str = typer.Option("map", help="Of the tileset: a-z, 0-9, _ and -."),
    formats: list[str] = typer.Option(
        ["pmtiles"], "--format", help="pmtiles (always written), mbtiles, folder; several times for several."
    ),
    floor: float = typer.Option(
        None, min=0, max=1, help="Share of the tiles that must be there (env GEO_ASSETS_COVERAGE_FLOOR, default 0.995)."
    ),
    allow_dirty: bool = typer.Option(False, help="Publish tiles that wait for their build as they stand."),
    cap: int = typer.Option(None, min=1, help="Tiles a region may have (env GEO_ASSETS_MANIFEST_CAP, default 20,000)."),
    as_json: bool = typer.Option(False, "--json", help="Print the manifest as JSON for programs."),
) -> None:
    """Publish a region (default: the whole map) as it stands now under a new, immutable version.

    Refuses below the coverage floor and while tiles of it wait for their build. Example:

        geo-assets publish --name helsinki --bbox 24.93,60.16,24.96,60.18 --zooms 0-16 --format mbtiles
    """
    from geo_assets.services.regions import RegionError
    from geo_assets.services.tileset.publishing import Request
    from geo_assets.services.tileset.publishing import publish as publish_region
    from geo_assets.services.tileset.regions import region_of
    from geo_assets.services.tileset.registry import TilesetError
    from geo_assets.services.tileset.snapshot import BelowFloor, TilesDirty, map_link
    from geo_assets.tiles.tileset import TilesetNameError

    with open_home() as stack:
        tiles_url = stack.settings.tiles_url
        try:
            request = Request(
                name,
                region_of(stack, region=region, bbox=bbox, cells=cells or (), feature=feature, zooms=zooms, cap=cap),
                tuple(formats),
                stack.settings.coverage_floor if floor is None else floor,
                allow_dirty,
            )
            with _Bar() as bar:
                done = publish_region(stack, request, progress=bar.show)
        except BelowFloor as fault:
            _table(
                err,
                ("missing", "why", "map"),
                [(key, why, map_link(tiles_url, key)) for key, why in fault.missing[:MISSING_SHOWN]],
            )
            if len(fault.missing) > MISSING_SHOWN:
                err.print(f"… and {len(fault.missing) - MISSING_SHOWN:,} more")
            raise CliError(str(fault)) from None
        except (RegionError, TilesetError, TilesetNameError, TilesDirty) as fault:
            raise CliError(str(fault)) from None
    if as_json:
        out.print(json.dumps(done.manifest, ensure_ascii=False), soft_wrap=True, markup=False)
        return
    _tell(done, tiles_url)


def _tell(done: Published, tiles_url: str) -> None:
    version, stamps = done.version, done.manifest
    coverage = stamps["coverage"]
    out.print(
        f"[bold green]{done.name} {version.version}[/bold green] published: {version.tiles:,} tiles of "
        f"{coverage['expected']:,} ({coverage['share']:.2%} present, {coverage['empty']:,} empty), "
        f"{stamps['tiles']['contents']:,} contents, z{version.zooms[0]}-{version.zooms[1]}, in {done.seconds:.1f} s"
    )
    for kind, file in version.files.items():
        out.print(f"  {kind:<8} {_size(file.bytes):>9}  {file.object}", soft_wrap=True)
    out.print(f"  served   {tiles_url}/tilesets/{done.name}.json", soft_wrap=True)
    if coverage["dirty"]:
        out.print(f"  [yellow]{coverage['dirty']:,} tiles waited for their build and are published as they stood[/]")
    if not done.in_force:
        out.print("  [yellow]a later publication is in force already; geo-assets rollback moves the pointer[/]")
    if done.swept:
        out.print(f"  {done.swept:,} objects that a dead publisher had left were removed")


def rollback(
    name: str = typer.Argument(..., help="Of the tileset."),
    to: str = typer.Option(None, help="Version or its number; default: the one before the one in force."),
) -> None:
    """Move a tileset's pointer to another version. No tile is touched; maps follow within half a minute."""
    from geo_assets.services.tileset import registry
    from geo_assets.services.tileset.keeping import whole

    with open_home() as stack, _Explained():
        target = registry.target_of(registry.read(stack.ledger, name), to)
        if not whole(stack, name, target):
            raise CliError(f"{name} {target.version}: its files are gone from the tile store; publish anew instead")
        before, after = registry.roll_back(stack.ledger, name, target.version)
        out.print(
            f"{name}: {before or 'none'} → [bold green]{after.version}[/bold green], "
            f"{after.tiles:,} tiles, published {_moment(after.published_at_ms)}"
        )


@family.callback(invoke_without_command=True)
def _default(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_tilesets(as_json=False)


@family.command(name="list")
def list_tilesets(as_json: bool = typer.Option(False, "--json", help="Print JSON for programs.")) -> None:
    """List tilesets and the version of each that is in force."""
    from geo_assets.services.tileset import registry

    with open_home() as stack:
        found = _all(stack)
        tiles_url = stack.settings.tiles_url
    if as_json:
        plain = [_plain(one, registry.now_ms()) for one in found]
        out.print(json.dumps(plain, ensure_ascii=False), soft_wrap=True, markup=False)
        return
    if not found:
        out.print("no tilesets; geo-assets publish makes one")
        return
    rows = [
        (one.name, *_row(one.in_force), str(len(one.versions)), f"{tiles_url}/tilesets/{one.name}.json")
        for one in found
    ]
    _table(out, ("name", "in force", "published", "tiles", "zooms", "size", "region", "versions", "address"), rows)


@family.command()
def show(
    name: str = typer.Argument(..., help="Of the tileset."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON for programs."),
) -> None:
    """Show a tileset's versions, its pins, and how its pointer moved."""
    from geo_assets.services.tileset import registry

    with open_home() as stack, _Explained():
        tileset = registry.read(stack.ledger, name)
    now = registry.now_ms()
    if as_json:
        out.print(json.dumps(_plain(tileset, now), ensure_ascii=False), soft_wrap=True, markup=False)
        return
    pinned = tileset.pinned(now)
    rows = [
        (
            "→" if one.version == tileset.current else "",
            *_row(one),
            ", ".join(one.files),
            "pinned" if one.version in pinned else "",
        )
        for one in reversed(tileset.versions)
    ]
    _table(out, ("", "version", "published", "tiles", "zooms", "size", "region", "files", ""), rows)
    live = [pin for pin in tileset.pins if pin.version in pinned]
    if live:
        out.print()
        _table(
            out,
            ("pin", "version", "reader", "until"),
            [(pin.id, pin.version, pin.reader, _moment(pin.until_ms) if pin.until_ms else "unpinned") for pin in live],
        )
    out.print()
    _table(
        out,
        ("when", "what", "from", "to"),
        [(_moment(one.at_ms), one.what, one.before or "", one.after or "") for one in tileset.history[-20:]],
    )


@family.command()
def prune(
    name: str = typer.Argument(..., help="Of the tileset."),
    keep: int = typer.Option(..., min=0, help="How many of the newest versions stay."),
) -> None:
    """Remove old versions. The one in force and those that a reader pinned stay in any case."""
    from geo_assets.services.tileset.keeping import prune as prune_versions

    with open_home() as stack, _Explained():
        gone = prune_versions(stack, name, keep)
    out.print(
        f"{len(gone)} {'version' if len(gone) == 1 else 'versions'} removed, {_size(sum(one.bytes for one in gone))}: "
        + (", ".join(one.version for one in gone) or "nothing to do")
    )


@family.command()
def pin(
    name: str = typer.Argument(..., help="Of the tileset."),
    version: str = typer.Argument(..., help="Version or its number."),
    reader: str = typer.Option(..., help="Who goes on with it, for people."),
    days: float = typer.Option(None, min=0.001, max=36_500, help="For how long; default: until it is unpinned."),
) -> None:
    """Keep a version from being pruned while a reader goes on with it."""
    from geo_assets.services.tileset import registry

    with open_home() as stack, _Explained():
        made = registry.pin(stack.ledger, name, version, reader, for_s=None if days is None else days * 86_400)
    out.print(f"pin {made.id}: {name} {made.version} stays for {escape(made.reader)}")


@family.command()
def unpin(
    name: str = typer.Argument(..., help="Of the tileset."),
    pin_id: str = typer.Argument(..., help="As geo-assets tilesets show lists it."),
) -> None:
    """Let go of a reader's pin."""
    from geo_assets.services.tileset import registry

    with open_home() as stack, _Explained():
        found = registry.unpin(stack.ledger, name, pin_id)
    if not found:
        raise CliError(f"tileset {name} has no pin {pin_id}; geo-assets tilesets show {name} lists them")
    out.print(f"pin {pin_id} is gone")


class _Explained:
    """Errors that are written for people become one line."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, fault: BaseException | None, _: Any) -> None:
        from geo_assets.services.tileset.registry import TilesetError
        from geo_assets.tiles.tileset import TilesetNameError

        if isinstance(fault, TilesetError | TilesetNameError):
            raise CliError(str(fault)) from None


class _Bar:
    """One bar a part of the work."""

    def __enter__(self) -> _Bar:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("{task.description:>14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=err
        )
        self._tasks: dict[str, Any] = {}
        self._bar.start()
        return self

    def show(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total)
        self._bar.update(self._tasks[what], completed=done)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _all(stack: Stack) -> list[Tileset]:
    from geo_assets.services.tileset import registry

    found: list[Tileset] = []
    for name in registry.names(stack.ledger):
        try:
            found.append(registry.read(stack.ledger, name))
        except registry.UnknownTileset:
            continue  # Its first publication has not begun to write.
    return found


def _plain(tileset: Tileset, at_ms: int) -> dict[str, Any]:
    from dataclasses import asdict

    plain = asdict(tileset)
    return {
        "name": tileset.name,
        "current": tileset.current,
        "versions": [{**asdict(one), "bytes": one.bytes} for one in tileset.versions],
        "history": plain["history"],
        "pins": [asdict(one) for one in tileset.pins if not one.until_ms or one.until_ms > at_ms],
        "publishing": [name for name, claim in tileset.claims.items() if claim.until_ms > at_ms],
    }


def _row(version: Version | None) -> tuple[str, ...]:
    if version is None:
        return ("none", "", "", "", "", "")
    zooms = f"{version.zooms[0]}-{version.zooms[1]}"
    when = _moment(version.published_at_ms)
    return (version.version, when, f"{version.tiles:,}", zooms, _size(version.bytes), version.title)


def _moment(ms: int) -> str:
    from geo_assets.services.status import moment

    return (moment(ms) or "")[:19] + "Z"


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _table(console: Any, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
