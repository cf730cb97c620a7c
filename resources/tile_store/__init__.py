"""Tile store: immutable objects by name. protocol.py says what is promised; the other modules keep it."""
