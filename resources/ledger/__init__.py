"""Ledger: what exists and what is wanted, per tile. protocol.py says what is promised; the other modules keep it."""
