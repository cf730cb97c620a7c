"""Readers of users' files: what `geo-assets import` takes, format by format. Nothing is stored here."""
