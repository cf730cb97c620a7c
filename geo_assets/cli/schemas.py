"""`geo-assets schemas`: write the documents that other programs read: AsyncAPI, JSON Schemas, OpenAPI."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer

from geo_assets.cli.answers import out


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Look")(schemas)


def schemas(
    what: Literal["asyncapi", "json", "openapi"] = typer.Argument(
        ..., help="asyncapi: the topics. json: a JSON Schema a topic. openapi: edge and tile server."
    ),
    folder: Path = typer.Argument(..., help="Folder to write to; it is made."),
) -> None:
    """Write documents for other programs: the topics as AsyncAPI or JSON Schemas, the HTTP services as OpenAPI."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in documents(what).items():
        (folder / name).write_text(text, encoding="utf-8")
        out.print(str(folder / name), soft_wrap=True, markup=False)


def documents(what: Literal["asyncapi", "json", "openapi"]) -> dict[str, str]:
    """File name to text. They describe the defaults: no setting of this machine shows in them."""
    from geo_assets.ports import topic_specs
    from geo_assets.services import asyncapi
    from geo_assets.settings import Settings

    if what == "asyncapi":
        return {"asyncapi.yaml": asyncapi.asyncapi_yaml(topic_specs(Settings.model_construct()))}
    if what == "json":
        return {f"{topic}.json": asyncapi.json_text(schema) for topic, schema in asyncapi.json_schemas().items()}
    from geo_assets import __version__
    from geo_assets.services.edge_api import edge_document
    from geo_assets.services.tileserver.api import openapi
    from geo_assets.tiles.tile import MAX_ZOOM

    defaults = Settings.model_construct()
    return {
        "openapi-edge.json": asyncapi.json_text(edge_document(defaults.edge_url)),
        "openapi-tiles.json": asyncapi.json_text(openapi(defaults.tiles_url, __version__, MAX_ZOOM)),
    }
