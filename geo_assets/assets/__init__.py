"""Thin Dagster shells over the domain: one file for each asset family."""

import warnings

from dagster import BetaWarning

# Observable source assets and backfill policies are beta in Dagster; the lock file pins the release we tested.
warnings.filterwarnings("ignore", category=BetaWarning)
