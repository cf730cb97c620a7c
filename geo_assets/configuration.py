"""The two files people write: layers (what the map consists of) and sources (who may write to it).

A home folder without them gets both on first start: the sample's layers, and one source with a secret of its own.
"""

from __future__ import annotations

import os
import secrets
from importlib import resources as packaged
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from geo_assets.events.sources import Sources
from geo_assets.tiles.layers import Layer, LayerError, LayerSet

if TYPE_CHECKING:
    from geo_assets.settings import Settings

DEFAULT_SOURCE = "demo"


class ConfigurationError(Exception):
    """A file of the configuration that cannot be used; the message names the file, the field and what to do."""


def layers_path(settings: Settings) -> Path:
    """Where the layers are defined."""
    return settings.layers_file or settings.home / "layers.yaml"


def sources_path(settings: Settings) -> Path:
    """Where the sources are defined."""
    return settings.sources_file or settings.home / "sources.yaml"


def load_layers(settings: Settings) -> LayerSet:
    """The map's layers from their file, which is written with the sample's layers where it is missing.

    Raises:
        ConfigurationError: The file cannot be read or is no set of layers.
    """
    path = layers_path(settings)
    if not path.exists():
        if settings.layers_file is not None:
            raise ConfigurationError(f"layers file {path} is not there; name another by GEO_ASSETS_LAYERS_FILE")
        _write_new(path, sample_layers_text(), mode=0o644)
    return parse_layers(_read_mapping(path), str(path))


def sample_layers_text() -> str:
    """The sample's layers as YAML."""
    return packaged.files("geo_assets").joinpath("sample/layers.yaml").read_text(encoding="utf-8")


def parse_layers(value: dict[str, Any], where: str) -> LayerSet:
    """A set of layers from plain values.

    Raises:
        ConfigurationError: A field is unknown, missing or outside its range.
    """
    try:
        entries = value["layers"]
        layers: list[Layer] = []
        for entry in entries:
            fields = dict(entry)
            if fields.get("attributes") is not None:
                fields["attributes"] = tuple(fields["attributes"])
            layers.append(Layer(**fields))
        rest = {k: v for k, v in value.items() if k in ("buffer", "extent", "max_zoom", "attribution")}
        unknown = sorted(set(value) - set(rest) - {"layers"})
        if unknown:
            raise ConfigurationError(
                f"{where}: {unknown[0]}: no such field; there are layers, buffer, extent, max_zoom, attribution"
            )
        return LayerSet(tuple(layers), **rest)
    except KeyError as fault:
        raise ConfigurationError(f"{where}: {fault.args[0]} is missing") from None
    except (LayerError, TypeError, ValueError) as fault:
        message = str(fault).replace("Layer.__init__() got an unexpected keyword argument", "a layer has no field")
        raise ConfigurationError(f"{where}: {message}") from None


def load_sources(settings: Settings) -> Sources:
    """Who may write, from their file, which is written with one source and a new secret where it is missing.

    Raises:
        ConfigurationError: The file cannot be read or is no set of sources.
    """
    path = sources_path(settings)
    if not path.exists():
        if settings.sources_file is not None:
            raise ConfigurationError(f"sources file {path} is not there; name another by GEO_ASSETS_SOURCES_FILE")
        _write_new(path, new_sources_text(), mode=0o600)
    try:
        return Sources.from_mapping(_read_mapping(path))
    except ValueError as fault:
        raise ConfigurationError(f"{path}: {fault}") from None


def new_sources_text() -> str:
    """A first sources file: one source that may write every layer, with a secret made now."""
    import base64

    secret = "whsec_" + base64.b64encode(secrets.token_bytes(24)).decode()
    return (
        "# Who may write to the map. A secret may stand beside an older one while senders rotate.\n"
        "sources:\n"
        f"  {DEFAULT_SOURCE}:\n"
        f"    secrets: [{secret}]\n"
        "    default_crs: EPSG:4326   # of a body that declares none\n"
        "    # layers: [buildings]    # all layers unless named\n"
        "    # repair: make_valid     # reject unless asked\n"
    )


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise ConfigurationError(f"{path}: {fault.strerror or fault}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as fault:
        where = getattr(fault, "problem_mark", None)
        line = f" at line {where.line + 1}" if where is not None else ""
        raise ConfigurationError(f"{path}: not YAML{line}") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path}: a mapping is expected, not {type(value).__name__}")
    return value


def _write_new(path: Path, text: str, mode: int) -> None:
    """Write a file that is not there, whole or not at all; another process that was first wins."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(text, encoding="utf-8")
        draft.chmod(mode)
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    except OSError as fault:
        raise ConfigurationError(f"{path}: cannot be written: {fault.strerror or fault}") from None
