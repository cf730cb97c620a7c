"""Feature store: what is on the map, one transaction for features, applied keys and outbox.

protocol.py says what is promised; the other modules keep it.
"""
