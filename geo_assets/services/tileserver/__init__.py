"""The tile server: tiles as the ledger names them, what changed as a stream, and the map page. Loads without dagster.

`app` has the routes, `serving` the tiles and their cache, `stream` the change stream, `coverage` the ledger as a
picture, `style` how layers look, `metrics` the figures and `models` what goes over the wire.
"""

from __future__ import annotations

from geo_assets.services.tileserver.app import Options, create_app, run

__all__ = ["Options", "create_app", "run"]
