"""docs/aws.md: its table is what the script prints, figures are the benchmarks', and what it names is there."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from geo_assets.settings import Settings
from geo_assets_tests.deploy.examples import of_dagster, read
from geo_assets_tests.deploy.manifests import Object, build, copy_with_secrets, named

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


def test_the_script_refuses_what_it_does_not_know() -> None:
    command = [sys.executable, str(ROOT / "deploy/costs.py")]
    plain = subprocess.run(command, capture_output=True, text=True, check=False)
    wrong = subprocess.run([*command, "--region", "us-east-1"], capture_output=True, text=True, check=False)

    assert (plain.returncode, plain.stderr) == (0, "")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "--region" in wrong.stderr


def test_more_views_take_more_of_the_tile_server_and_more_nodes(costs: ModuleType) -> None:
    planet = costs.LOADS["planet"]
    few, many = (costs.quantities(dataclasses.replace(planet, views_a_month=views)) for views in (1e9, 1e11))

    assert many["cores to answer them"] == pytest.approx(100 * few["cores to answer them"])
    assert many["nodes of 4 vCPU"] > few["nodes of 4 vCPU"]
    assert f"{costs.TILES_A_CORE:,} requests a second of one core of the tile server" in " ".join(PAGE.split())


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
    policies = {name: json.loads(text) for name, text in written.items() if '"Version"' in text}
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


BALANCERS = ("10.0.0.0/19", "10.0.32.0/19")
EXPORTED = {
    "AWS_REGION": "eu-central-1",
    "ACCOUNT": "210987654321",
    "BUCKET": "other-maps",
    "DOMAIN": "map.example.net",
    "BROKERS": "b-1.maps.k.kafka.eu-central-1.amazonaws.com:9098,b-2.maps.k.kafka.eu-central-1.amazonaws.com:9098",
    "BALANCERS": "\t".join(BALANCERS),
    "CERTIFICATE": "arn:aws:acm:eu-central-1:210987654321:certificate/0b1c",
    "ACL": "arn:aws:wafv2:eu-central-1:210987654321:regional/webacl/maps/2d3e",
    "DIGEST": f"sha256:{'7' * 64}",
}
"""What the blocks before export, by example."""


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout in which the block that edits the overlay was pasted."""
    root = tmp_path_factory.mktemp("checkout")
    copy_with_secrets(root / "deploy")
    shutil.copy(ROOT / "deploy/prometheus/rules.yml", root / "deploy/prometheus/rules.yml")
    (root / "geo_assets/sample").mkdir(parents=True)
    shutil.copy(ROOT / "geo_assets/sample/layers.yaml", root / "geo_assets/sample/layers.yaml")
    (root / "rds.pem").write_text("an authority\n")
    (block,) = re.findall(r"^```sh\n(set_to\(\).*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **EXPORTED}
    done = subprocess.run(["bash", "-euc", block], cwd=root, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return root


@pytest.fixture(scope="module")
def objects(edited: Path) -> list[Object]:
    return build(edited / "deploy/k8s/overlays/aws")


def test_pasted_the_page_gives_the_settings_that_it_describes(edited: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("GEO_ASSETS_")]:
        monkeypatch.delenv(variable)
    active, _ = read(edited / "deploy/settings/aws.env")
    secrets = {
        "GEO_ASSETS_POSTGRES_URL": "postgresql://geo_assets@maps.k.eu-central-1.rds.amazonaws.com:5432/geo_assets",
        "GEO_ASSETS_REDIS_URL": "rediss://:abc@maps.k.euc1.cache.amazonaws.com:6379/0",
    }
    for name, value in {**active, **secrets}.items():
        monkeypatch.setenv(name, value)

    found = Settings()

    assert found.kafka_servers == EXPORTED["BROKERS"]
    assert (found.kafka_security_protocol, found.kafka_sasl_mechanism) == ("SASL_SSL", "AWS_MSK_IAM")
    assert (found.kafka_sasl_username, found.kafka_sasl_password) == (None, None)
    assert (found.postgres_auth, str(found.postgres_ssl_ca)) == ("aws-iam", "/etc/geo_assets/rds.pem")
    assert found.purge_urls is None or not found.purge_urls
    assert found.forwarded_allow_ips == ",".join(BALANCERS)
    assert not re.search(r"123456789012|eu-west-1|example\.org|my-maps", "\n".join(active.values()))


def test_pasted_the_page_leaves_nothing_of_the_example_in_the_manifests(objects: list[Object]) -> None:
    text = json.dumps([each for each in objects if each["kind"] != "ConfigMap"])
    assert not re.search(r"123456789012|eu-west-1|example\.org|10\.0\.0\.0/20|sha256:0{64}", text)
    maps = named(objects, "ConfigMap")
    assert maps["geo-assets-settings"]["data"]["GEO_ASSETS_LOGS_BUCKET"] == EXPORTED["BUCKET"]
    assert set(maps["geo-assets-files"]["data"]) == {"layers.yaml", "rds.pem"}
    for each in named(objects, "Ingress").values():
        assert each["metadata"]["annotations"]["alb.ingress.kubernetes.io/wafv2-acl-arn"] == EXPORTED["ACL"]
        assert each["metadata"]["annotations"]["alb.ingress.kubernetes.io/certificate-arn"] == EXPORTED["CERTIFICATE"]
    (rule,) = named(objects, "NetworkPolicy")["edge-from-load-balancer"]["spec"]["ingress"]
    assert [each["ipBlock"]["cidr"] for each in rule["from"]] == list(BALANCERS)


def test_every_port_that_settings_or_the_page_name_is_let_out(objects: list[Object]) -> None:
    services = named(objects, "NetworkPolicy")["services"]["spec"]["egress"]
    allowed = {port["port"] for rule in services for port in rule["ports"]}
    active, shown = read(ROOT / "deploy/settings/aws.env")
    # Traces are opt-in with a way out of their own (docs/kubernetes.md); what begins with PUBLIC is for browsers.
    addresses = {
        name: value
        for name, value in {**shown, **active}.items()
        if re.search(r"_(SERVERS|URLS?|ENDPOINT)$", name) and "PUBLIC" not in name and "OTLP" not in name
    }
    of_settings = {int(port) for value in addresses.values() for port in re.findall(r"[\w\]]:(\d{2,5})\b", value)}
    (opened,) = re.findall(r"^for port in ([\d ]+); do", PAGE, re.MULTILINE)

    assert {5432, 6379, 9096, 6081} <= of_settings
    assert of_settings <= allowed
    assert {9096, 9098} <= {int(port) for port in opened.split()} <= allowed
    assert {int(port) for port in re.findall(r"port (90\d\d)", PAGE)} <= allowed
    assert {int(port) for port in re.findall(r"@(?:DB|\$DB|PRIMARY|\$PRIMARY):(\d+)", PAGE)} <= allowed


def test_the_web_acl_that_the_ingress_names_is_made_on_the_page() -> None:
    (rules,) = re.findall(r"^cat > limit\.json <<EOF\n(.*?)^EOF$", PAGE, re.DOTALL | re.MULTILINE)
    (rule,) = json.loads(rules.replace("$(printf edge.$DOMAIN | base64)", ""))
    limit = rule["Statement"]["RateBasedStatement"]["Limit"]
    assert "--rules file://limit.json" in PAGE
    assert f"{limit:,} in five minutes" in PAGE
    # What a block uses, a block before it has exported.
    for name in EXPORTED:
        assert f"export {name}=" in PAGE or f" {name}=" in PAGE, name
