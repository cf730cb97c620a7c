"""docs/aws.md: its table is what the script prints, figures are the benchmarks', and what it names is there."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from geo_assets.settings import Settings
from geo_assets_tests.deploy.examples import of_dagster

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/aws.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def costs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("costs", ROOT / "deploy/costs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["costs"] = module
    spec.loader.exec_module(module)
    return module


def test_the_table_of_costs_is_what_the_script_prints(costs: ModuleType) -> None:
    found = re.search(r"<!-- costs -->\n(.*?)<!-- /costs -->", PAGE, re.DOTALL)
    assert found is not None
    assert found[1] == costs.table()


def test_what_the_script_calls_measured_stands_in_the_benchmarks(costs: ModuleType) -> None:
    text = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    for what, (figure, words) in costs.MEASURED.items():
        assert words in text, what
        assert f"{figure:,}" in words, what


def test_where_prices_come_from_is_on_the_page(costs: ModuleType) -> None:
    text = " ".join(PAGE.split())
    assert costs.TAKEN in text


def test_a_larger_map_costs_more_and_a_price_of_nothing_costs_less(
    costs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = [sum(costs.costs(load).values()) for load in costs.LOADS.values()]
    assert sums == sorted(sums)
    for name in costs.PRICES:
        with monkeypatch.context() as changed:
            changed.setattr(costs, "PRICES", {**costs.PRICES, name: 0.0})
            assert sum(sum(costs.costs(load).values()) for load in costs.LOADS.values()) < sum(sums), name


def test_every_setting_on_the_page_is_one() -> None:
    known = {f"GEO_ASSETS_{name.upper()}" for name in Settings.model_fields} | of_dagster()
    assert set(re.findall(r"GEO_ASSETS_[A-Z0-9_]+", PAGE)) - known == set()


def test_every_file_and_folder_on_the_page_is_there() -> None:
    # `deploy/code` after a verb is kubectl's short form of a Deployment.
    text = re.sub(r"kubectl -n geo-assets [a-z-]+ deploy/[a-z-]+", "", PAGE)
    named = set(re.findall(r"(?<![\w/.])(deploy/[\w./-]*\w)", text)) | {
        f"docs/{name}" for name in re.findall(r"\]\(([\w-]+\.md)\)", PAGE)
    }
    assert "deploy/k8s/overlays/aws" in named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_services_and_deployments_that_commands_name_are_in_the_manifests() -> None:
    objects = [
        made
        for path in (ROOT / "deploy/k8s/base").glob("*.yaml")
        for made in yaml.safe_load_all(path.read_text(encoding="utf-8"))
        if isinstance(made, dict) and "kind" in made and "metadata" in made
    ]
    there = {(made["kind"], made["metadata"]["name"]) for made in objects}
    for short, kind in (("svc", "Service"), ("deploy", "Deployment")):
        names = set(re.findall(rf"kubectl -n geo-assets [a-z-]+ {short}/([a-z-]+)", PAGE))
        assert names
        assert {(kind, name) for name in names} <= there
    accounts = set(re.findall(r"^role ([a-z]+)(?: [a-z]+)+$", PAGE, re.MULTILINE))
    assert {("ServiceAccount", name) for name in accounts} <= there
    assert accounts == {name for kind, name in there if kind == "ServiceAccount"}


def test_every_policy_is_json_and_each_role_s_policies_are_written() -> None:
    written = dict(re.findall(r"^cat > (\w+)\.json <<EOF\n(.*?)^EOF$", PAGE, re.DOTALL | re.MULTILINE))
    policies = {name: json.loads(text) for name, text in written.items() if '"Statement"' in text}
    for name, policy in policies.items():
        assert policy["Version"] == "2012-10-17"
        for statement in policy["Statement"]:
            assert statement["Resource"] != "*", name
            actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
            assert not [action for action in actions if action.endswith("*")], name
    used = {part for line in re.findall(r"^role [a-z]+ (.+)$", PAGE, re.MULTILINE) for part in line.split()}
    assert used | {"writer"} == set(policies)
    granted = {
        account: {
            action
            for name in named.split()
            for statement in policies[name]["Statement"]
            for action in ([statement["Action"]] if isinstance(statement["Action"], str) else statement["Action"])
        }
        for account, named in re.findall(r"^role ([a-z]+) (.+)$", PAGE, re.MULTILINE)
    }
    store = {account: {each for each in actions if each.startswith("s3:")} for account, actions in granted.items()}
    assert store["tiles"] == {"s3:GetObject", "s3:ListBucket"}, "a tile server writes nothing"
    assert store["edge"] == {"s3:PutObject", "s3:AbortMultipartUpload"}, "an edge reads nothing"
    # A batch writes by the role it assumes, which its session narrows; by itself it writes what it prints.
    writing = {name for name, text in written.items() if name != "logs" and "PutObject" in text}
    (of_batch,) = re.findall(r"^role batch (.+)$", PAGE, re.MULTILINE)
    assert not writing & set(of_batch.split())
    assert {account for account, actions in granted.items() if "sts:AssumeRole" in actions} == {"batch", "run"}
    for account in ("batch", "run"):
        assert f"role/geo-assets-{account}" in PAGE[PAGE.index("--role-name geo-assets-tile-writer --assume") :]
