"""Which objects of a file become features of which layer: the small YAML that `geo-assets import --mapping` takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from geo_assets.services.reading.reading import ReadingError

Kind = Literal["point", "line", "area"]
Origin = Literal["node", "way", "relation"]

_TRUE = frozenset({"yes", "true", "1"})
_FALSE = frozenset({"no", "false", "0"})


class MappingError(ReadingError):
    """A mapping that cannot be used: it names the file, the field and what it may be."""


def _as_list(value: Any) -> Any:
    """A single value stands for a list of one."""
    return [value] if isinstance(value, str) else value


class Attribute(BaseModel):
    """Where an attribute comes from: the first of these columns or tags that is there, and its type."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    columns: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = Field(alias="from", min_length=1)
    type: Literal["as_is", "text", "integer", "number", "boolean"] = "as_is"

    def of(self, values: Mapping[str, Any]) -> Any:
        """The value, or None where no column has one or it is not of the type (OSM tags such as `3;4`)."""
        for column in self.columns:
            value = values.get(column)
            if value is not None:
                return _convert(value, self.type)
        return None


def _attribute(value: Any) -> Any:
    """`name` and `[a, b]` are short forms of `{from: ...}`."""
    return {"from": value} if isinstance(value, str | list) else value


Match = dict[str, Literal[True] | Annotated[frozenset[str], BeforeValidator(_as_list)]]


class Rule(BaseModel):
    """Objects of one kind for one layer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layer: str | None = Field(description="None: what the feature itself says, or the name of its table.")
    geometry: frozenset[Kind] = Field(default=frozenset({"point", "line", "area"}), min_length=1)
    origins: frozenset[Origin] | None = Field(default=None, alias="from", description="OpenStreetMap files only.")
    table: str | None = Field(default=None, description="Only this table of a file that has several.")
    match: Match = Field(default_factory=dict)
    unless: Match = Field(default_factory=dict)
    attributes: dict[str, Annotated[Attribute, BeforeValidator(_attribute)]] | None = Field(
        default=None, description="Attributes to keep, renamed; all as they are where this is absent."
    )

    def fits(self, values: Mapping[str, Any], kinds: Collection[str], origin: str | None, table: str | None) -> bool:
        """Whether an object with these tags or columns, which may be drawn as any of `kinds`, is this rule's."""
        if self.geometry.isdisjoint(kinds):
            return False
        if self.origins is not None and origin not in self.origins:
            return False
        if self.table is not None and table != self.table:
            return False
        return all(_holds(values, k, v) for k, v in self.match.items()) and not any(
            _holds(values, k, v) for k, v in self.unless.items()
        )

    def properties(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes that the feature keeps; one without a value is left out."""
        if self.attributes is None:
            return dict(values)
        found = ((name, attribute.of(values)) for name, attribute in self.attributes.items())
        return {name: value for name, value in found if value is not None}


class LayerMapping(BaseModel):
    """The whole mapping: rules in order, and which columns hold id and version of a table's rows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str | None = Field(
        default=None,
        description="Column with the id, integer or text; else the file's own, or its name and the row's number.",
    )
    version: str | None = Field(default=None, description="Column with the version, a whole number.")
    rules: tuple[Rule, ...] = Field(min_length=1)

    @classmethod
    def single(
        cls, layer: str | None, *, id_column: str | None = None, version_column: str | None = None
    ) -> LayerMapping:
        """Everything into one layer (None: that of its table), every attribute as it is."""
        return cls(id=id_column, version=version_column, rules=(Rule(layer=layer),))

    def rule(
        self,
        values: Mapping[str, Any],
        kinds: Collection[str],
        *,
        origin: str | None = None,
        table: str | None = None,
    ) -> Rule | None:
        """The first rule that fits, or None."""
        for rule in self.rules:
            if rule.fits(values, kinds, origin, table):
                return rule
        return None

    def with_default(self, layer: str) -> LayerMapping:
        """The same rules; one that names no layer has this one."""
        rules = tuple(r if r.layer is not None else r.model_copy(update={"layer": layer}) for r in self.rules)
        return self.model_copy(update={"rules": rules})

    @property
    def layers(self) -> frozenset[str]:
        """Names of all layers that it writes."""
        return frozenset(rule.layer for rule in self.rules if rule.layer is not None)


def load_mapping(path: Path) -> LayerMapping:
    """A mapping from its YAML file.

    Raises:
        MappingError: The file cannot be read, is no YAML or no mapping.
    """
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MappingError(f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        raise MappingError(f"{path}: not YAML{'' if mark is None else f' at line {mark.line + 1}'}") from error
    try:
        return LayerMapping.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise MappingError(f"{path}: {where}: {first['msg']}") from error


def _holds(values: Mapping[str, Any], key: str, wanted: Literal[True] | frozenset[str]) -> bool:
    value = values.get(key)
    if value is None:
        return False
    if wanted is True:
        return value is not False and value != "no"
    return _text(value) in wanted


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else str(value)


def _convert(value: Any, kind: str) -> Any:
    try:
        match kind:
            case "text":
                return _text(value)
            case "integer":
                return value if isinstance(value, int) and not isinstance(value, bool) else int(_text(value).strip())
            case "number":
                number = float(_text(value).strip().removesuffix(" m"))
                return number if number - number == 0 else None  # neither infinite nor NaN: JSON has no such numbers
            case "boolean":
                text = _text(value).lower()
                # A bridge may say which kind it is: `viaduct` is a yes.
                return False if text in _FALSE else (True if text in _TRUE or isinstance(value, str) else None)
            case _:
                return value
    except ValueError:
        return None
