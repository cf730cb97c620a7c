"""The production ledger: the protocol on one schema of a Postgres database that many pods share.

Put together from its parts: reading, marking, building with the outbox, batches, manifests; named values are here.
Imports neither numpy nor dagster: the tile server reads the ledger in a slim image.
"""

from __future__ import annotations

from typing import Literal

from resources.ledger.postgres_batches import Batches
from resources.ledger.postgres_manifests import Manifests
from resources.ledger.postgres_reading import Reading
from resources.ledger.postgres_tables import Connection, changed, plain


class PostgresLedger(Reading, Manifests, Batches):
    """The ledger in Postgres.

    Keys are the caller's to validate: a key that is no partition key is stored as it is and comes back from `dirty()`
    like any other. One that is not ASCII or has a NUL, which no partition key can, is never stored: it reads as a tile
    nobody wanted, and a hint that names it does not count.

    Args and Raises: those of LedgerTables.
    """

    def get_value(self, name: str) -> str | None:
        """A named value."""
        rows = self.rows("SELECT value FROM named_value WHERE name = %s", (name,))
        return rows[0][0] if rows else None

    def set_value(self, name: str, value: str | None, *, expect: str | Literal["*"] | None = "*") -> bool:
        """Set (None deletes) if the present value is `expect` (None: absent, `*`: whatever); whether it was."""
        stored = None if value is None else plain(value)

        def work(db: Connection) -> bool:
            if expect is None:
                if stored is None:
                    return not changed(db, "SELECT 1 FROM named_value WHERE name = %s", (name,))
                insert = "INSERT INTO named_value VALUES (%s, %s) ON CONFLICT DO NOTHING"
                return changed(db, insert, (name, stored)) == 1
            if stored is None:
                delete = "DELETE FROM named_value WHERE name = %s AND (%s::text = '*' OR value = %s)"
                return changed(db, delete, (name, expect, expect)) == 1 or expect == "*"
            if expect == "*":
                upsert = """INSERT INTO named_value VALUES (%s, %s)
                            ON CONFLICT (name) DO UPDATE SET value = excluded.value"""
                return changed(db, upsert, (name, stored)) == 1
            update = "UPDATE named_value SET value = %s WHERE name = %s AND value = %s"
            return changed(db, update, (stored, name, expect)) == 1

        return self.write(work)
