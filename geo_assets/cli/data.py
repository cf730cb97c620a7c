"""Commands that change what is on the map: `import`, `post`, `erase`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from geo_assets.cli.answers import CliError, err, escape, open_home, out

if TYPE_CHECKING:
    from geo_assets.events.sources import Source
    from geo_assets.stack import Stack


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(name="import", rich_help_panel="Change")(import_file)
    app.command(rich_help_panel="Change")(post)
    app.command(rich_help_panel="Change")(erase)


def source_of(stack: Stack, name: str | None) -> Source:
    """The source of that name, or the only one.

    Raises:
        CliError: There is none of the name, or none was named and there are several.
    """
    if name is not None and name not in stack.sources:
        raise CliError(f"source {name!r} is not configured; there are {', '.join(stack.sources)}")
    if name is None and len(stack.sources) != 1:
        raise CliError(f"say --source: there are {', '.join(stack.sources)}")
    return stack.sources[name] if name is not None else next(iter(stack.sources.values()))


def import_file(
    file: Path = typer.Argument(..., help=".osm.pbf, .geojson, .geojsonl, .gpkg, .shp, .fgb or .parquet."),
    mapping: Path = typer.Option(None, help="YAML that says which objects become features of which layer."),
    layer: str = typer.Option(None, help="Layer of every feature that names none."),
    id_column: str = typer.Option(None, help="Column with each feature's id: integers or texts, none empty or twice."),
    source: str = typer.Option(None, help="Source whose features they become (default: the only one)."),
    crs: str = typer.Option(None, help="CRS of the file, such as EPSG:3067, where it declares none."),
    wait: bool = typer.Option(False, help="Stay until Dagster has built the tiles, with a progress bar."),
) -> None:
    """Import a file: same rules and same transaction as events that come in through the edge.

    What is refused becomes a dead letter with its reason. The changed tiles are marked as one manifest; with
    `geo-assets up` running they are built by themselves.

    Ids are unique per source, over all its layers and files: a feature whose id is there already
    replaces the one that has it. GeoJSON keeps its ids. A row of a table is known by file name, table
    and row (parcels.gpkg:parcels:17), so that importing the file again changes nothing; where rows
    come and go, or several files have one name, say --id-column. Examples:

        geo-assets import parcels.gpkg --layer buildings

        geo-assets import parcels.shp --layer buildings --id-column parcel_no

        geo-assets import city.osm.pbf --mapping mapping.yaml --wait
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from geo_assets.cli.backfill import follow
    from geo_assets.services.import_checks import check_crs, check_layers, check_tables
    from geo_assets.services.importer import Imported, import_reading
    from geo_assets.services.layer_changes import follow_layers
    from geo_assets.services.reading import open_file
    from geo_assets.services.reading.mapping import load_mapping
    from geo_assets.services.sample import folder, summary

    with open_home() as stack:
        chosen = source_of(stack, source)
        follow_layers(stack.ensure())
        rules = load_mapping(mapping) if mapping is not None else None
        if rules is None and file.name.endswith((".osm.pbf", ".osm", ".pbf")):
            rules = load_mapping(folder() / "mapping.yaml")
        if layer is not None:
            check_layers([layer], stack.layers, chosen, "--layer")
        if rules is not None:
            where = str(mapping) if mapping is not None else "the sample's mapping (say --mapping with your own)"
            check_layers(rules.layers, stack.layers, chosen, where)
        if crs is not None:
            crs = check_crs(crs)
        reading = open_file(file, rules, layer=layer, id_column=id_column, layers=stack.layers.names)
        if layer is None:
            check_tables(reading, rules, stack.layers, chosen)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
        )
        started = time.monotonic()
        with Progress(*columns, console=err) as bar:
            task = bar.add_task(escape(file.name), total=reading.total, speed="")

            def show(done: Imported) -> None:
                stored = sum(done.outcomes.values()) + sum(done.refused.values())
                bar.update(task, completed=stored, speed=f"{stored / max(1e-3, time.monotonic() - started):,.0f}/s")

            done = import_reading(stack, reading, chosen, crs=crs, progress=show)
            bar.update(task, total=done.read)
        out.print(summary(done))
        for reason, count in sorted(done.left_out.items()):
            out.print(f"  left out: {count:,} ({reason})")
        if not done.read:
            raise CliError(f"{file}: no feature in it fits the layers" if done.left_out else f"{file}: has no features")
        if done.manifest is not None:
            out.print(f"manifest {done.manifest.id} marked; geo-assets status shows how far it is")
            if wait:
                follow(stack, done.manifest.id)
        if done.refused:
            out.print("geo-assets dead-letters list says what was refused and why")
            if not done.outcomes:
                raise CliError(f"{file}: every feature was refused")


def post(
    file: Path = typer.Argument(..., help="GeoJSON to send; - reads standard input."),
    kind: str = typer.Option("features", help="Endpoint: features, tiles, positions or fences."),
    source: str = typer.Option(None, help="Source that signs (default: the only one)."),
    url: str = typer.Option(None, help="Edge to send to (default: the one of the settings)."),
    event_id: str = typer.Option(None, help="Webhook id; the same id and body again is a duplicate."),
    crs: str = typer.Option(None, help="CRS of the coordinates, sent as X-Source-CRS."),
    attempts: int = typer.Option(3, min=1, help="Tries when the edge is away or says 503."),
) -> None:
    """Sign a file as its source would and send it to the edge."""
    import hashlib

    import httpx

    from geo_assets.events.signature import sign

    if kind not in ("features", "tiles", "positions", "fences"):
        raise CliError(f"kind {kind!r} is none of features, tiles, positions, fences")
    body = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    with open_home() as stack:
        chosen = source_of(stack, source)
        base = (url or stack.settings.edge_url).rstrip("/")
    if not chosen.secrets:
        raise CliError(f"source {chosen.name} has no secret to sign with")
    webhook_id = event_id or "post-" + hashlib.sha256(body).hexdigest()[:24]
    answer: httpx.Response | None = None
    for attempt in range(attempts):
        headers = {
            "content-type": "application/geo+json" if kind == "features" else "application/json",
            "x-source": chosen.name,
        }
        headers |= sign(chosen.secrets[0], webhook_id, int(time.time()), body)
        if crs:
            headers["x-source-crs"] = crs
        try:
            answer = httpx.post(f"{base}/v1/{kind}", content=body, headers=headers, timeout=60, trust_env=False)
        except httpx.TransportError as fault:
            if attempt + 1 == attempts:
                raise CliError(f"edge {base} cannot be reached: {fault}; is geo-assets up?") from None
        else:
            if answer.status_code != 503:
                break
        time.sleep(min(5.0, 0.5 * 2**attempt))
    assert answer is not None
    shown: Any = answer.json() if "json" in answer.headers.get("content-type", "") else {"detail": answer.text[:300]}
    if answer.status_code != 202:
        field = f" ({shown['field']})" if shown.get("field") else ""
        raise CliError(f"{answer.status_code} {shown.get('title', '')}: {shown.get('detail', '')}{field}")
    out.print(json.dumps(shown), markup=False)


def erase(
    source: str = typer.Option(None, help="Source whose features and fences are erased."),
    layer: str = typer.Option(None, help="Only this layer."),
    device: str = typer.Option(None, help="Device that is forgotten: its place, and the fences it is in."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask."),
) -> None:
    """Erase the features of a source from store and tiles and its fences, or forget a device.

    Their ids stay as tombstones for twice the log's retention, so that a late or repeated event does not bring them
    back; an event with a higher version does. A device that sends positions again is a new one.
    """
    if (source is None) == (device is None):
        raise CliError("say --source or --device: one of them")
    if device is not None:
        if not device.strip():
            raise CliError("--device is empty")
        if layer is not None:
            raise CliError("--layer goes with --source: a device is in none")
        _forget(device)
        return
    from geo_assets.services.erasing import count_features, erase_features, erase_fences, fences_of

    with open_home() as stack:
        count = count_features(stack, source, layer)
        # A fence that was posted as such is in no layer.
        fences = len(fences_of(stack, source)) if layer is None else 0
        if source not in stack.sources and not count and not fences:
            raise CliError(
                f"source {source!r} is not configured and has no features; there are {', '.join(stack.sources)}"
            )
        if not count and not fences:
            out.print("nothing to erase")
            return
        what = f"{count:,} features" + (f" and {fences:,} fences" if fences else "")
        if not yes:
            if not sys.stdin.isatty():
                raise CliError(f"{what} would be erased: say --yes")
            typer.confirm(f"Erase {what} of {source}?", abort=True)
        erased = erase_features(stack, source, layer)
        if layer is None:
            erase_fences(stack, source)
        if fences:
            out.print(f"erased {fences:,} fences: whoever is in one leaves it while positions are routed")
        days = stack.settings.retention_s / 86_400
        out.print(f"erased {erased:,} features; their tiles are marked and are built anew while geo-assets is up")
        out.print(
            f"not reached: records of the event log (kept {days:g} days), dead letters and their inbox "
            f"({4 * days:g} days), superseded tile objects ({stack.settings.garbage_grace_s / 60:g} minutes after the "
            "rebuild), your backups, and what browsers have cached"
        )


def _forget(device: str) -> None:
    """Have the routing run forget a device; where none routes, this process does."""
    from dataclasses import replace

    from geo_assets.services import forgetting, routing

    with open_home() as stack:
        forgetting.wish(stack.ledger, device)
        options = replace(routing.options_of(stack.settings), idle_s=0.0, run_s=None, wait_s=0.0)
        routing.route(stack, options)
        deadline = time.monotonic() + 60.0
        while device in forgetting.wishes(stack.ledger):
            if time.monotonic() > deadline:
                raise CliError("the routing run has not forgotten it yet; it will, and this command may be given again")
            time.sleep(0.1)
        days = stack.settings.retention_s / 86_400
        out.print("forgotten, if it was known: its place, the fences it is in, the count of its triggers")
        out.print(
            f"not reached: records of positions and triggers (kept {days:g} days), dead letters ({4 * days:g} days), "
            "your backups, and what consumers of triggers have kept"
        )
