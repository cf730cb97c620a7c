from __future__ import annotations

import subprocess
import sys

from geo_assets_tests.waiting import patient

CODE = """
import importlib, pkgutil, sys
import geo_assets.geofence as package
for module in pkgutil.iter_modules(package.__path__):
    importlib.import_module(f"{package.__name__}.{module.name}")
outside = {"dagster", "resources", "sensors", "httpx", "starlette", "redis", "confluent_kafka", "psycopg", "obstore"}
print(sorted({name.split(".")[0] for name in sys.modules} & outside))
"""


def test_rule_8_geofences_load_without_an_orchestrator_a_port_or_a_network() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=patient(120)
    )
    assert answer.stdout.strip() == "[]"
