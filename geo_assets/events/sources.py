"""Sources: who may write, what they sign with, and what is taken for granted of their data. No file is read here.

Loads without a geometry library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast, get_args
from urllib.parse import urlsplit

from geo_assets.events.signature import SecretError, secret_key

Repair = Literal["reject", "make_valid"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


def is_source_name(text: str) -> bool:
    """Whether a source could be called so, configured or not."""
    return _NAME.fullmatch(text) is not None


class SourceError(ValueError):
    """A source's definition that cannot be: its field, value and limit are in the message."""


class UnknownSource(LookupError):
    """No source of that name; or none was named and there are several."""


@dataclass(frozen=True, slots=True)
class Source:
    """One sender.

    Args:
        name: 1 to 64 characters of `A-Z a-z 0-9 . _ -`; it begins every key, before a colon.
        secrets: What it signs with, the newest first; several while one is rotated. `whsec_` and base64, or plain text.
        layers: Layers it may write; None is every layer.
        default_layer: Layer of a feature that names none.
        default_crs: CRS of data that declares none, such as `EPSG:4326`; None refuses such data.
        repair: What happens to an invalid geometry: `reject` it, or `make_valid` keeping its dimension.
        allow_ballpark: Take transformations PROJ can only do roughly, and coordinates outside the CRS's area of use.
        expected_box: West, south, east, north in degrees (EPSG:4326 lon/lat) that every geometry must lie in.
        max_vertices: Vertices one feature may have; None leaves it to the settings.
        max_body_bytes: Bytes one body may have, decompressed; None leaves it to the settings.
        callback_urls: URLs to which the outcome of an event may be told.
        expect_every_s: Seconds within which something new of it is expected; silent for longer, it fails the check
            `source_silence`. None: silence is no fault.

    Raises:
        SourceError: A value outside its range.
    """

    name: str
    secrets: tuple[str, ...] = field(default=(), repr=False)
    layers: frozenset[str] | None = None
    default_layer: str | None = None
    default_crs: str | None = None
    repair: Repair = "reject"
    allow_ballpark: bool = False
    expected_box: tuple[float, float, float, float] | None = None
    max_vertices: int | None = None
    max_body_bytes: int | None = None
    callback_urls: tuple[str, ...] = ()
    expect_every_s: float | None = None

    def __post_init__(self) -> None:
        if not is_source_name(self.name):
            raise SourceError(
                f"source name {self.name[:80]!r} is not 1..64 characters of A-Z, a-z, 0-9, '.', '_' and '-'"
            )
        for number, secret in enumerate(self.secrets):
            try:
                secret_key(secret)
            except SecretError as fault:
                raise SourceError(f"source {self.name}: secrets[{number}]: {fault}") from None
        if self.default_layer is not None and not self.may_write(self.default_layer):
            raise SourceError(f"source {self.name}: default_layer {self.default_layer!r} is not among its layers")
        if self.repair not in get_args(Repair):
            raise SourceError(f"source {self.name}: repair {self.repair!r} is neither 'reject' nor 'make_valid'")
        for name in ("max_vertices", "max_body_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SourceError(f"source {self.name}: {name} {value} is below 1")
        if self.expect_every_s is not None and not 0 < self.expect_every_s < float("inf"):
            raise SourceError(f"source {self.name}: expect_every_s {self.expect_every_s} is not above 0")
        if self.expected_box is not None:
            west, south, east, north = self.expected_box
            if not (-180 <= west < east <= 180 and -90 <= south < north <= 90):
                raise SourceError(
                    f"source {self.name}: expected_box {list(self.expected_box)} is not "
                    "west < east within ±180 and south < north within ±90"
                )
        for url in self.callback_urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
                raise SourceError(
                    f"source {self.name}: callback_urls: {url[:80]!r} is no http(s) URL without a user name"
                )

    def may_write(self, layer: str) -> bool:
        """Whether this source may write that layer."""
        return self.layers is None or layer in self.layers

    @classmethod
    def from_mapping(cls, name: str, values: Mapping[str, Any]) -> Source:
        """A source from plain values, as a YAML file has them.

        Args:
            name: Its name.
            values: The other fields under their names; lists for tuples, one text where a list has a single entry.

        Raises:
            SourceError: An unknown field, a value of the wrong type, or one outside its range.
        """
        known = {f.name for f in fields(cls)} - {"name"}
        made: dict[str, Any] = {}
        for key, value in values.items():
            if key not in known:
                raise SourceError(f"source {name}: unknown field {key!r}; there are {', '.join(sorted(known))}")
            if value is not None or key in ("layers", "default_layer", "default_crs", "expected_box"):
                made[key] = _typed(name, key, value)
        return cls(name=name, **made)


def _typed(source: str, key: str, value: Any) -> Any:
    """One field's value in the type the dataclass wants."""
    wrong = SourceError(f"source {source}: {key} {str(value)[:80]!r} is of the wrong type")
    if value is None:
        return None
    if key in ("secrets", "layers", "callback_urls"):
        entries = _list_of([value] if isinstance(value, str) else value)
        if entries is None or not all(isinstance(entry, str) for entry in entries):
            raise SourceError(f"source {source}: {key} is not a list of texts")
        return frozenset(entries) if key == "layers" else tuple(entries)
    if key == "expected_box":
        numbers = _list_of(value)
        if (
            numbers is None
            or len(numbers) != 4
            or not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers)
        ):
            raise SourceError(
                f"source {source}: expected_box {str(value)[:80]!r} is not four numbers: west, south, east, north"
            )
        return tuple(float(n) for n in numbers)
    if key == "allow_ballpark":
        if not isinstance(value, bool):
            raise wrong
        return value
    if key in ("max_vertices", "max_body_bytes"):
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong
        return value
    if key == "expect_every_s":
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise wrong
        return float(value)
    if key == "default_crs" and isinstance(value, int) and not isinstance(value, bool):
        return f"EPSG:{value}"
    if not isinstance(value, str):
        raise wrong
    return value


def _list_of(value: Any) -> list[Any] | None:
    """The entries of a list, tuple or set; None for anything else."""
    return list(cast(Iterable[Any], value)) if isinstance(value, list | tuple | set | frozenset) else None


class Sources(Mapping[str, Source]):
    """Every source, by name."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._by_name: dict[str, Source] = {}
        for source in sources:
            if source.name in self._by_name:
                raise SourceError(f"source {source.name} is defined twice")
            self._by_name[source.name] = source

    def __getitem__(self, name: str) -> Source:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def resolve(self, name: str | None) -> Source:
        """The source a request speaks for: the one it names, or the only one there is.

        Args:
            name: What `X-Source` said; None or empty when it was absent.

        Raises:
            UnknownSource: No such source, or none was named and there is not exactly one.
        """
        if name:
            try:
                return self._by_name[name]
            except KeyError:
                raise UnknownSource(f"no source {name[:80]!r}") from None
        if len(self._by_name) != 1:
            raise UnknownSource(f"X-Source is missing and there are {len(self._by_name)} sources")
        return next(iter(self._by_name.values()))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Sources:
        """Sources from plain values: `{"sources": {name: fields}}`, or `{name: fields}`.

        Raises:
            SourceError: The form is another, or a source's definition cannot be.
        """
        inner: Any = mapping.get("sources", mapping)
        if not isinstance(inner, Mapping):
            raise SourceError("sources: a mapping of names to fields is needed")
        made: list[Source] = []
        for name, values in cast(Mapping[Any, Any], inner).items():
            if not isinstance(name, str) or not isinstance(values, Mapping | None):
                raise SourceError(f"source {str(name)[:80]!r}: a mapping of fields is needed")
            made.append(Source.from_mapping(name, cast(Mapping[str, Any], values or {})))
        return cls(made)
