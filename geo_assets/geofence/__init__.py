"""Geofences: fences, their index, the state of every device in them, and the triggers that come of it.

Positions in, triggers out, as columns. No orchestrator, no log and no network here: who reads the positions and sends
the triggers brings bytes and numbers, and keeps the order of `replay`.
"""
