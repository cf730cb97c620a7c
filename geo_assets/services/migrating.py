"""Tables of the stack that the settings choose: their versions, which steps they lack, bringing them up to date.

In Postgres they are migrated here and nowhere else. The embedded adapters' files are migrated whenever they are opened;
here they only are opened on purpose, so that the first start after an update is not the one that waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from geo_assets.settings import Settings
    from resources.migrations import Migration


class Migrated(NamedTuple):
    """A component and the versions of its tables, before and after."""

    component: str
    before: int
    after: int


class Version(NamedTuple):
    """A component's tables: where they are, of which version, and which one this program works with."""

    component: str
    where: str
    found: int
    """0 where there is none yet."""
    known: int
    made_when_opened: bool
    """An embedded adapter's file: opening it makes it and brings it up to date."""
    oldest: int
    """The oldest version whose programs work with these tables."""

    @property
    def lacking(self) -> int:
        """Steps that the tables lack; none where they are newer, or a file that is not there yet.

        Raises:
            SchemaTooNew: They are of a later version than this program knows, and not compatible with it.
        """
        from resources.migrations import SchemaTooNew

        if self.oldest > self.known:
            raise SchemaTooNew(
                f"{self.component} in {self.where} has version {self.found}, which works with programs of version "
                f"{self.oldest} and newer; this program knows up to {self.known}: use a newer one"
            )
        return 0 if self.made_when_opened and not self.found else max(0, self.known - self.found)


@dataclass(frozen=True, slots=True)
class _Component:
    name: str
    setting: str
    url: str
    migrations: Sequence[Migration]


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    path: Path
    query: str
    oldest_query: str
    known: int


def migrate_all(settings: Settings) -> list[Migrated]:
    """Apply every step that is missing. A file that is not there yet is left to its first opening.

    Raises:
        SchemaTooNew: Tables are of a later version than this program knows.
        ConfigurationError: Postgres cannot be reached, or refuses; the setting is named.
    """
    import psycopg

    from geo_assets.configuration import ConfigurationError
    from geo_assets.stack import Stack
    from resources.migrations import migrate, version
    from resources.postgres import conninfo, explained

    done: list[Migrated] = []
    for each in _components(settings):
        with explained(ConfigurationError, each.setting, each.url):
            applied = migrate(each.url, settings.postgres_schema, each.name, each.migrations)
            with psycopg.connect(conninfo(each.url)) as connection:
                after = version(connection, settings.postgres_schema, each.name)
        done.append(Migrated(each.name, after - len(applied), after))
    before = {file.name: found for file in _files(settings) if (found := _version_of(file))}
    with Stack(settings) as stack:
        # Opening one is all it takes.
        if "feature_store" in before:
            _ = stack.features
        if "ledger" in before:
            _ = stack.ledger
    done.extend(
        Migrated(file.name, before[file.name], _version_of(file)) for file in _files(settings) if file.name in before
    )
    return done


def versions(settings: Settings, component: str | None = None) -> list[Version]:
    """Versions of each component's tables; nothing is changed.

    Args:
        settings: Where they are.
        component: Ask for this one alone; the other one's server may be away.

    Raises:
        ConfigurationError: Postgres cannot be reached; the setting is named.
    """
    import psycopg

    from geo_assets.configuration import ConfigurationError
    from resources.migrations import standing
    from resources.postgres import conninfo, explained, where

    found: list[Version] = []
    for each in _components(settings):
        if component not in (None, each.name):
            continue
        with explained(ConfigurationError, each.setting, each.url), psycopg.connect(conninfo(each.url)) as connection:
            stands = standing(connection, settings.postgres_schema, each.name)
        place = f"{where(each.url)}, schema {settings.postgres_schema}"
        known = len(each.migrations)
        found.append(Version(each.name, place, stands.version, known, made_when_opened=False, oldest=stands.oldest))
    for file in _files(settings):
        if component not in (None, file.name):
            continue
        stands, oldest = _version_of(file), _version_of(file, file.oldest_query)
        place = str(file.path)
        found.append(Version(file.name, place, stands, file.known, made_when_opened=True, oldest=oldest or stands))
    return found


def pending(settings: Settings, component: str | None = None) -> dict[str, int]:
    """Steps that each component's tables lack; none for a file that is not there yet, or for newer tables.

    Args:
        settings: Where they are.
        component: Ask for this one alone.

    Raises:
        SchemaTooNew: Tables are of a later version than this program knows, and not compatible with it.
        ConfigurationError: Postgres cannot be reached; the setting is named.
    """
    return {each.component: each.lacking for each in versions(settings, component)}


def _components(settings: Settings) -> list[_Component]:
    from resources.feature_store import postgis_schema
    from resources.ledger import postgres_schema

    found: list[_Component] = []
    for name, own, setting, migrations in (
        (
            postgis_schema.COMPONENT,
            settings.feature_store_url,
            "GEO_ASSETS_FEATURE_STORE_URL",
            postgis_schema.MIGRATIONS,
        ),
        (postgres_schema.COMPONENT, settings.ledger_url, "GEO_ASSETS_LEDGER_URL", postgres_schema.MIGRATIONS),
    ):
        url = own or settings.postgres_url
        if url is not None:
            named = setting if own is not None else "GEO_ASSETS_POSTGRES_URL"
            found.append(_Component(name, named, url.get_secret_value(), migrations))
    return found


def _files(settings: Settings) -> list[_File]:
    from resources.feature_store import gpkg_schema
    from resources.ledger import sqlite_schema
    from resources.sqlite import OLDEST_QUERY, VERSION_QUERY

    found: list[_File] = []
    if (settings.feature_store_url or settings.postgres_url) is None:
        path = settings.home / "features.gpkg"
        found.append(
            _File("feature_store", path, gpkg_schema.VERSION_QUERY, gpkg_schema.OLDEST_QUERY, gpkg_schema.VERSION)
        )
    if (settings.ledger_url or settings.postgres_url) is None:
        path = settings.home / "ledger.db"
        found.append(_File("ledger", path, VERSION_QUERY, OLDEST_QUERY, sqlite_schema.VERSION))
    return found


def _version_of(file: _File, query: str | None = None) -> int:
    """Version of a file's tables, or what another query answers; 0 where there is none."""
    import sqlite3

    from geo_assets.configuration import ConfigurationError
    from resources.sqlite import file_version

    try:
        return file_version(file.path, query or file.query)
    except sqlite3.Error as fault:
        raise ConfigurationError(f"{file.path} is damaged or no database of ours: {fault}") from None
