"""Benchmarks: `python -m benchmarks` runs all, `python -m benchmarks.NAME [--quick] [--json FILE]` one of them."""
