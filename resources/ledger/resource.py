"""The ledger as a Dagster resource: hands out the plain client. The only file here that needs Dagster."""

from __future__ import annotations

from dagster import ConfigurableResource
from pydantic import Field

from resources.ledger.protocol import Ledger
from resources.ledger.sqlite import SqliteLedger


class LedgerResource(ConfigurableResource):
    """The embedded ledger.

    Args:
        path: The SQLite file, such as `ledger.db` in the home folder.
    """

    path: str = Field(description="File of the embedded ledger.")

    def client(self) -> Ledger:
        """Open it. The caller closes what it opened."""
        return SqliteLedger(self.path)
