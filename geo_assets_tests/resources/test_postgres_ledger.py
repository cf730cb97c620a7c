"""The production ledger under the contract, against the model, and what is its own: many servers' worth of markers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from geo_assets_tests.postgres_rooms import PostgresRoom, postgres_room
from geo_assets_tests.resources.contract_ledger import Connect, LedgerContract, RaceContract
from resources.ledger.postgres import PostgresLedger
from resources.ledger.postgres_schema import COMPONENT, MIGRATIONS
from resources.migrations import migrate


@pytest.fixture
def room() -> Iterator[PostgresRoom]:
    with postgres_room() as room:
        migrate(room.url, room.schema, COMPONENT, MIGRATIONS)
        yield room


@pytest.fixture
def connect(room: PostgresRoom) -> Connect:
    def opened(clock):
        # A process that a test killed may have left its last statement to the server.
        room.wait_until_idle()
        return PostgresLedger(room.url, room.schema, clock_ms=clock)

    return opened


@pytest.fixture
def opening(room: PostgresRoom) -> str:
    return (
        "from resources.ledger.postgres import PostgresLedger\n"
        f"ledger = PostgresLedger({room.url!r}, {room.schema!r}, pool=2)"
    )


class TestPostgresLedger(LedgerContract):
    pass


class TestPostgresLedgerRaces(RaceContract):
    # A prime, so that no step of the walk is always the same; the embedded ledger walks them all.
    every = 17

    @pytest.fixture
    def connect(self, room: PostgresRoom) -> Connect:
        # Ten thousand short transactions, none of which has to outlive a power failure.
        url = f"{room.url}&options=-c%20synchronous_commit%3Doff"
        return lambda clock: PostgresLedger(url, room.schema, clock_ms=clock)
