"""The outside world, one folder a port: protocol, adapters, and a thin Dagster resource in a file of its own.

Ports speak keys, bytes, rows and plain records. Nothing here imports geo_assets or sensors.
"""
