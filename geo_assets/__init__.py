"""geo_assets: a live map platform on Dagster. Tiles are partitions, edits are events, rules are asset checks."""

__version__ = "0.1.0"
