"""Simulated devices made real: positions sent to the edge or the log, edits posted, triggers watched.

How devices move is the matter of `geo_assets.simulation`.
"""
