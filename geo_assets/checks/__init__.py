"""Thin Dagster shells over the domain: one file for each check family."""
