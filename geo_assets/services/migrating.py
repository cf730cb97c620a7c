"""Tables of the stack that the settings choose: which steps they lack, and bringing them up to date.

Only what is in Postgres is migrated here. The embedded adapters' files are migrated when they are opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from geo_assets.settings import Settings
    from resources.migrations import Migration


class Migrated(NamedTuple):
    """A component and the versions of its tables, before and after."""

    component: str
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class _Component:
    name: str
    setting: str
    url: str
    migrations: Sequence[Migration]


def migrate_all(settings: Settings) -> list[Migrated]:
    """Apply every step that is missing; nothing to do where nothing is in Postgres.

    Raises:
        SchemaTooNew: Tables are of a later version than this program knows.
        ConfigurationError: Postgres cannot be reached, or refuses; the setting is named.
    """
    from geo_assets.configuration import ConfigurationError
    from resources.migrations import migrate
    from resources.postgres import explained

    done: list[Migrated] = []
    for each in _components(settings):
        with explained(ConfigurationError, each.setting, each.url):
            applied = migrate(each.url, settings.postgres_schema, each.name, each.migrations)
        after = len(each.migrations)
        done.append(Migrated(each.name, after - len(applied), after))
    return done


def pending(settings: Settings) -> dict[str, int]:
    """Steps that each component's tables lack.

    Raises:
        SchemaTooNew: Tables are of a later version than this program knows.
        ConfigurationError: Postgres cannot be reached; the setting is named.
    """
    import psycopg

    from geo_assets.configuration import ConfigurationError
    from resources.migrations import SchemaTooNew, version
    from resources.postgres import conninfo, explained

    lacking: dict[str, int] = {}
    for each in _components(settings):
        with explained(ConfigurationError, each.setting, each.url), psycopg.connect(conninfo(each.url)) as connection:
            found = version(connection, settings.postgres_schema, each.name)
        if found > len(each.migrations):
            raise SchemaTooNew(
                f"{each.name} in schema {settings.postgres_schema} is of version {found}, this program knows up to "
                f"{len(each.migrations)}: use a newer one"
            )
        lacking[each.name] = len(each.migrations) - found
    return lacking


def _components(settings: Settings) -> list[_Component]:
    from resources.feature_store import postgis_schema as store
    from resources.ledger import postgres_schema as ledger

    found: list[_Component] = []
    for name, own, setting, migrations in (
        (
            store.COMPONENT,
            settings.feature_store_url,
            "GEO_ASSETS_FEATURE_STORE_URL",
            store.MIGRATIONS,
        ),
        (ledger.COMPONENT, settings.ledger_url, "GEO_ASSETS_LEDGER_URL", ledger.MIGRATIONS),
    ):
        url = own or settings.postgres_url
        if url is not None:
            named = setting if own is not None else "GEO_ASSETS_POSTGRES_URL"
            found.append(_Component(name, named, url.get_secret_value(), migrations))
    return found
