"""Sensors: pure planning functions under thin decorated shells."""
