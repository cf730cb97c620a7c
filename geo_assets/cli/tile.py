"""`geo-assets tile Z/X/Y`: decode a tile as it is served, and print it."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import typer

from geo_assets.cli.answers import CliError, escape, open_home, out


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Look")(tile)


def tile(
    path: str = typer.Argument(..., metavar="Z/X/Y", help="The tile, such as 14/9327/4741, or its partition key."),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON for programs."),
    features: int = typer.Option(5, min=0, help="Features a layer to print."),
) -> None:
    """Decode a tile and print its state, layers and features."""
    from geo_assets.ports import tile_object
    from geo_assets.services.status import moment
    from geo_assets.tiles.decode import DecodeError, decode
    from geo_assets.tiles.tile import Tile
    from geo_assets.tiles.workkey import tile_hash

    wanted = Tile.from_key(path) if ":" in path else Tile.from_path(path)
    with open_home() as stack:
        state = stack.ledger.read([wanted.key])[wanted.key]
        name = state.object_name
        stored = stack.tiles.get(tile_object(name)) if name else None
    if name and stored is None:
        raise CliError(
            f"tile {wanted}: the ledger names {name}, and it is not in the tile store; the integrity check mends it"
        )
    try:
        data = gzip.decompress(stored) if stored is not None else b""
        if stored is not None and tile_hash(data) != state.content_hash:
            raise DecodeError("it has another hash than the ledger says")
        layers = decode(data)
    except (DecodeError, OSError, EOFError, zlib.error) as fault:
        raise CliError(f"tile {wanted}: its object {name} cannot be decoded: {fault}") from None
    summary: dict[str, Any] = {
        "tile": str(wanted),
        "partition": wanted.key,
        "revision": state.revision,
        "work_key": state.work_key,
        "content_hash": state.content_hash,
        "bytes": state.bytes,
        "stored_bytes": len(stored or b""),
        "built": moment(state.built_at_ms),
        "dirty": state.dirty,
        "error": state.error,
        "bounds": list(wanted.bounds),
    }
    if as_json:
        summary["layers"] = [_plain(layer, None) for layer in layers]
        out.print(json.dumps(summary), soft_wrap=True, markup=False)
        return
    for field, value in summary.items():
        out.print(f"[bold]{field:>13}[/bold]  {escape(str(value))}", soft_wrap=True)
    for layer in layers:
        out.print(
            f"\n[bold green]{escape(layer.name)}[/bold green]: {len(layer.features):,} features, extent {layer.extent}"
        )
        for feature in _plain(layer, features)["features"]:
            out.print("  " + json.dumps(feature, ensure_ascii=False)[:300], soft_wrap=True, markup=False)


def _plain(layer: Any, limit: int | None) -> dict[str, Any]:
    from dataclasses import asdict

    chosen = layer.features if limit is None else layer.features[:limit]
    return {
        "name": layer.name,
        "extent": layer.extent,
        "features": [_browser_safe(asdict(feature)) for feature in chosen],
    }


def _browser_safe(value: Any) -> Any:
    """Integers above 2^53 as strings: JSON readers in browsers would round them."""
    if isinstance(value, dict):
        return {k: _browser_safe(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_browser_safe(v) for v in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**53:
        return str(value)
    if not isinstance(value, int) and hasattr(value, "tolist"):
        return _browser_safe(value.tolist())
    return value
