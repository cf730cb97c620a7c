"""What a map costs on AWS a month: a table of a city, a country and a planet, for docs/aws.md.

    python deploy/costs.py

Three kinds of figures go in, each on a line of its own: prices (assumptions, to be replaced by those of your region and
day), loads (assumptions, to be replaced by yours), and what was measured (docs/benchmarks.md, quoted word for word).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass

TAKEN = "eu-west-1, on demand, US dollars, written down from memory on 2026-11-30 and not checked against a price list"

PRICES: Mapping[str, float] = {
    "EKS control plane, an hour": 0.10,
    "node m7i.xlarge (4 vCPU, 16 GiB), an hour": 0.225,
    "MSK broker kafka.t3.small, an hour": 0.053,
    "MSK broker kafka.m7g.large, an hour": 0.228,
    "MSK broker kafka.m7g.2xlarge, an hour": 0.912,
    "MSK storage, a GB and month": 0.11,
    "RDS db.t4g.large, two zones, an hour": 0.28,
    "RDS db.r7g.xlarge, two zones, an hour": 1.06,
    "RDS db.r7g.8xlarge, two zones, an hour": 8.48,
    "RDS storage gp3, two zones, a GB and month": 0.254,
    "ElastiCache cache.t4g.small, an hour": 0.036,
    "ElastiCache cache.m7g.large, an hour": 0.176,
    "S3 storage, a GB and month": 0.023,
    "S3 puts, a thousand": 0.005,
    "S3 gets, a thousand": 0.0004,
    "load balancer, an hour": 0.0252,
    "load balancer's capacity unit, an hour": 0.008,
    "web ACL with a rule, a month": 6.0,
    "web ACL's requests, a million": 0.60,
    "NAT gateway, an hour": 0.048,
    "CloudFront requests, ten thousand": 0.012,
    "CloudFront to the internet, a GB": 0.085,
}
"""Assumptions: list prices without savings plans, committed use or a private price for traffic."""

MEASURED: Mapping[str, tuple[float, str]] = {
    "tiles/s of a run on two cores": (211, "| the same within the run | 402 tiles/s | 211 tiles/s |"),
    "requests/s of one edge": (2_601, "| edge, most with 64 connections | 2,601 requests/s (1.7×) |"),
    "catalog events/s": (
        2_396,
        "| 3,993 (91) events/s | 2,396 (34) events/s |",
    ),
    "positions/s of one routing run": (18_935, "**18,935 positions/s** for 60 s"),
    "cores of that routing run": (0.59, "no lag at its end, 0.59 cores"),
}
"""Figures with the words of docs/benchmarks.md that they are taken from."""

TILE_BYTES = 15_000
"""Assumption: a compressed tile, over all zooms and views."""
TILES_AN_EDIT = 14
"""Assumption: tiles that one edit has built, zooms 0 to 16 less what edits of one moment share."""
CACHED = 0.9
"""Assumption: share of views that CloudFront answers without an object's being read: of unchanged tiles a 304 does."""
ANSWER_BYTES = 500
"""Assumption: of a 304, and of the headers of any answer."""
TILES_A_CORE = 1_000
"""Assumption, not measured: requests/s of one core of the tile server. Every view reaches it, if only for a 304."""
VIEWS_PEAK = 3
"""Assumption: views a second at the busiest over those of the average."""
POSITIONS_A_REQUEST = 100
"""Assumption: positions come to the edge in batches."""
UNIT_GB_AN_HOUR = 1
"""What a capacity unit carries. New connections and rules, by which it is counted too, are few here."""
ACLS = 2
"""Web ACLs, each of which counts each request: the load balancer's and CloudFront's (docs/aws.md)."""
MONTH_S = 730 * 3_600
"""Seconds of a month."""
FEATURE_BYTES, LEDGER_BYTES, CATALOG_BYTES = 900, 400, 1_500
"""Assumptions: of a row with its indexes in PostGIS, in the ledger and in Dagster's event log."""
CATALOG_DAYS = 14
"""GEO_ASSETS_KEEP_HISTORY_S: how long superseded materializations are kept."""
RECORD_BYTES, RETENTION_DAYS, COPIES = 1_000, 7, 3
"""Assumption: of a record; GEO_ASSETS_RETENTION_S; GEO_ASSETS_KAFKA_REPLICATION_FACTOR."""
HOURS = 730
"""Of a month."""
TILES_CORES = 0.5
"""Of BASE_CORES: what the two pods of the tile server ask for."""
BASE_CORES = 4.6
"""Requests of deploy/k8s/base with two pods each of edge, ingest, fast lane and tile server, and one small run."""
FILLED = 0.7
"""How full nodes are planned."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a map has to do. All of it is assumed."""

    features: float
    tiles: float
    """Kept in the tile store."""
    edits_a_day: float
    peak: float
    """Edits a second at the busiest over those of the average."""
    positions_a_second: float
    views_a_month: float
    """Of tiles."""
    broker: str
    brokers: int
    database: str
    cache: str


LOADS: Mapping[str, Load] = {
    "city": Load(3e5, 1e5, 5e3, 20, 50, 3e7, "kafka.t3.small", 3, "db.t4g.large", "cache.t4g.small"),
    "country": Load(4e7, 8e6, 4e5, 10, 2_000, 1e9, "kafka.m7g.large", 3, "db.r7g.xlarge", "cache.m7g.large"),
    "planet": Load(1.2e9, 3e8, 5e6, 5, 15_000, 1.5e10, "kafka.m7g.2xlarge", 6, "db.r7g.8xlarge", "cache.m7g.large"),
}


def quantities(load: Load) -> dict[str, float]:
    """What follows from a load, before prices."""
    builds_a_day = load.edits_a_day * TILES_AN_EDIT
    peak_builds = builds_a_day / 86_400 * load.peak
    build_cores = peak_builds / (MEASURED["tiles/s of a run on two cores"][0] / 2)
    route_cores = (
        load.positions_a_second
        / MEASURED["positions/s of one routing run"][0]
        * MEASURED["cores of that routing run"][0]
    )
    posts = load.positions_a_second / POSITIONS_A_REQUEST
    edges = max(2, math.ceil((load.edits_a_day / 86_400 * load.peak + posts) / MEASURED["requests/s of one edge"][0]))
    peak_views = load.views_a_month / MONTH_S * VIEWS_PEAK
    tile_cores = peak_views / TILES_A_CORE
    cores = BASE_CORES + build_cores + route_cores + (edges - 2) * 0.25 + max(0.0, tile_cores - TILES_CORES)
    through_balancer = (
        load.views_a_month * ((1 - CACHED) * TILE_BYTES + ANSWER_BYTES)
        + (load.edits_a_day / 86_400 + load.positions_a_second) * MONTH_S * RECORD_BYTES
    )
    records_a_day = load.edits_a_day + 2 * builds_a_day + load.positions_a_second * 86_400
    return {
        "tiles built a day": builds_a_day,
        "tiles built a second, at the busiest": peak_builds,
        "cores to build them": build_cores,
        "cores to route positions": route_cores,
        "tile views a second, at the busiest": peak_views,
        "cores to answer them": tile_cores,
        "nodes of 4 vCPU": max(3, math.ceil(cores / (4 * FILLED))),
        "catalog rows a day": builds_a_day,
        "share of the day the catalog is written": builds_a_day / MEASURED["catalog events/s"][0] / 86_400,
        "Kafka, GB with copies": records_a_day * RECORD_BYTES * RETENTION_DAYS * COPIES / 1e9,
        "Postgres, GB": (
            load.features * FEATURE_BYTES
            + load.tiles * LEDGER_BYTES
            + (load.tiles + builds_a_day * CATALOG_DAYS) * CATALOG_BYTES
        )
        / 1e9,
        "tile store, GB": load.tiles * TILE_BYTES / 1e9,
        "through the load balancer, GB a month": through_balancer / 1e9,
        "requests through web ACLs a month": ACLS * load.views_a_month + (load.edits_a_day / 86_400 + posts) * MONTH_S,
        "from CloudFront, GB a month": load.views_a_month * TILE_BYTES / 1e9,
    }


def costs(load: Load) -> dict[str, float]:
    """US dollars a month by what is paid for."""
    of = quantities(load)

    def hours(price: str, count: float = 1) -> float:
        return PRICES[price] * HOURS * count

    monthly_builds = of["tiles built a day"] * 30
    return {
        "EKS and nodes": hours("EKS control plane, an hour")
        + hours("node m7i.xlarge (4 vCPU, 16 GiB), an hour", of["nodes of 4 vCPU"]),
        "MSK": hours(f"MSK broker {load.broker}, an hour", load.brokers)
        + of["Kafka, GB with copies"] * PRICES["MSK storage, a GB and month"],
        "RDS": hours(f"RDS {load.database}, two zones, an hour")
        + of["Postgres, GB"] * PRICES["RDS storage gp3, two zones, a GB and month"],
        "ElastiCache": hours(f"ElastiCache {load.cache}, an hour", 2),
        "S3": of["tile store, GB"] * PRICES["S3 storage, a GB and month"]
        + monthly_builds / 1_000 * PRICES["S3 puts, a thousand"]
        + (load.views_a_month * (1 - CACHED) + monthly_builds) / 1_000 * PRICES["S3 gets, a thousand"],
        "load balancer and NAT": hours("load balancer, an hour")
        + hours(
            "load balancer's capacity unit, an hour",
            max(1.0, of["through the load balancer, GB a month"] / HOURS / UNIT_GB_AN_HOUR),
        )
        + hours("NAT gateway, an hour", 3),
        "WAF": ACLS * PRICES["web ACL with a rule, a month"]
        + of["requests through web ACLs a month"] / 1e6 * PRICES["web ACL's requests, a million"],
        "CloudFront": load.views_a_month / 10_000 * PRICES["CloudFront requests, ten thousand"]
        + of["from CloudFront, GB a month"] * PRICES["CloudFront to the internet, a GB"],
    }


def table() -> str:
    """The table in Markdown: loads, what follows from them, and dollars a month."""
    names = list(LOADS)
    rows = [
        ("features", [load.features for load in LOADS.values()]),
        ("tiles kept", [load.tiles for load in LOADS.values()]),
        ("edits a day", [load.edits_a_day for load in LOADS.values()]),
        ("positions a second", [load.positions_a_second for load in LOADS.values()]),
        ("tile views a month", [load.views_a_month for load in LOADS.values()]),
    ]
    found = {name: quantities(load) for name, load in LOADS.items()}
    rows += [(what, [found[name][what] for name in names]) for what in found[names[0]]]
    paid = {name: costs(load) for name, load in LOADS.items()}
    lines = [f"| | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
    lines += [f"| {what} | {' | '.join(map(_short, values))} |" for what, values in rows]
    lines += [f"| **{what}, $** | {' | '.join(_dollars(paid[n][what]) for n in names)} |" for what in paid[names[0]]]
    lines += [f"| **all, $ a month** | {' | '.join(_dollars(sum(paid[name].values())) for name in names)} |"]
    return "\n".join(lines) + "\n"


def _short(value: float) -> str:
    for size, letter in ((1e9, " bn"), (1e6, " M")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _dollars(value: float) -> str:
    return f"{value:,.0f}"


if __name__ == "__main__":
    # Prices and loads are changed in this file: whoever gives them here would get the table of others.
    argparse.ArgumentParser(description="Print what a map costs on AWS a month.").parse_args()
    print(f"Prices: {TAKEN}.\n")
    print(table(), end="")
