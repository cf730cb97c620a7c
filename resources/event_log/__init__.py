"""Event log: ordered records by topic and partition. protocol.py says what is promised; the other modules keep it."""
