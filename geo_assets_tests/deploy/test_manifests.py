"""deploy/k8s: what every overlay promises, read from what kustomize builds. No cluster is needed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from geo_assets.services.draining import LAST_S
from geo_assets.settings import Settings
from geo_assets_tests.deploy.examples import DEPLOY, read
from geo_assets_tests.deploy.manifests import (
    COMPONENTS,
    K8S,
    OVERLAYS,
    Object,
    build,
    copy_with_secrets,
    kustomize,
    named,
    pods,
    with_components,
)
from geo_assets_tests.deploy.test_settings_examples import SECRET

ROLES = {"edge", "ingest", "live", "tiles", "code", "dagster-webserver", "dagster-daemon"}
COMPONENT = "app.kubernetes.io/component"
WITH = {
    "aws, everything": ("aws", "keda", "monitoring", "ui-alb-oidc"),
    "local, everything": ("local", "hpa", "monitoring", "ingress-nginx", "ui-oauth2-proxy"),
}
"""Overlays with the components that they do not have by themselves."""

VARIANTS = (*OVERLAYS, *WITH)
DOCUMENTED = (DEPLOY.parent / "docs" / "kubernetes.md").read_text()


@pytest.fixture(scope="module")
def k8s(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the folder with secrets of its own."""
    kustomize()
    return copy_with_secrets(tmp_path_factory.mktemp("deploy") / "deploy")


@pytest.fixture(scope="module")
def variants(k8s: Path) -> dict[str, list[Object]]:
    """The objects of each overlay, by itself and with components."""
    found = {name: build(k8s / "overlays" / name) for name in OVERLAYS}
    for name, (overlay, *components) in WITH.items():
        found[name] = build(with_components(k8s, overlay, *components))
    return found


@pytest.fixture(params=VARIANTS)
def objects(request: pytest.FixtureRequest, variants: dict[str, list[Object]]) -> list[Object]:
    return variants[request.param]


def containers(template: Object) -> list[Object]:
    return [*template["spec"]["containers"], *template["spec"].get("initContainers", [])]


def ours(objects: list[Object]) -> dict[str, Object]:
    """Pod templates of the platform's own image, by name."""
    return {
        name: template
        for _, name, template in pods(objects)
        if "geo-assets" in template["spec"]["containers"][0]["image"].split("@")[0].split(":")[0]
    }


def settings_of(objects: list[Object]) -> dict[str, str]:
    return named(objects, "ConfigMap")["geo-assets-settings"]["data"]


def components_of(objects: list[Object]) -> dict[str, Object]:
    """Pod templates by component; runs are pods that no object here makes."""
    found = {template["metadata"]["labels"][COMPONENT]: template for _, _, template in pods(objects)}
    return found | {"run": {"metadata": {"labels": {COMPONENT: "run"}}, "spec": {"containers": [{"name": "run"}]}}}


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector chooses what has these labels; an empty one chooses everything."""
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for each in selector.get("matchExpressions", []):
        assert each["operator"] == "In"
        if labels.get(each["key"]) not in each["values"]:
            return False
    return True


def mebibytes(quantity: str) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)(Mi|Gi)", quantity).groups()  # type: ignore[union-attr]
    return float(number) * (1024 if unit == "Gi" else 1)


def cores(quantity: str) -> float:
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


# -- objects -------------------------------------------------------------------------------------------------------


def test_every_component_is_tried_in_some_variant() -> None:
    assert {path.name for path in (K8S / "components").iterdir()} == set(COMPONENTS)
    used = {name for _, *components in WITH.values() for name in components}
    assert used == set(COMPONENTS)


def test_every_role_is_there_in_the_namespace_and_says_whose_it_is(objects: list[Object]) -> None:
    assert set(named(objects, "Deployment")) >= ROLES
    assert {*named(objects, "Job"), *named(objects, "CronJob")} >= {"migrate", "mend", "janitor"}
    for each in objects:
        where = f"{each['kind']} {each['metadata']['name']}"
        if each["kind"] != "Namespace":
            assert each["metadata"].get("namespace") == "geo-assets", where
        assert each["metadata"]["labels"].get("geo-assets/step") in ("prepare", "migrate", "serve"), where
    for _, name, template in pods(objects):
        assert template["metadata"]["labels"]["app.kubernetes.io/part-of"] == "geo-assets", name


def test_what_is_needed_comes_before_what_needs_it(objects: list[Object]) -> None:
    """In the order of the steps: configuration and accounts, then the migration, then what serves."""
    for each in objects:
        step, kind = each["metadata"]["labels"]["geo-assets/step"], each["kind"]
        if kind == "Job" and each["metadata"]["name"] == "migrate":
            assert step == "migrate"
        elif kind in ("Deployment", "CronJob", "Ingress", "HorizontalPodAutoscaler", "ScaledObject"):
            assert step == "serve", each["metadata"]["name"]
        elif kind in ("Namespace", "ConfigMap", "Secret", "ServiceAccount", "Role", "RoleBinding", "NetworkPolicy"):
            assert step == "prepare", each["metadata"]["name"]


def test_the_namespace_enforces_the_restricted_standard(objects: list[Object]) -> None:
    (labels,) = [each["metadata"]["labels"] for each in objects if each["kind"] == "Namespace"]
    assert {labels[f"pod-security.kubernetes.io/{mode}"] for mode in ("enforce", "warn", "audit")} == {"restricted"}


# -- pods ----------------------------------------------------------------------------------------------------------


def restricted_faults(template: Object) -> list[str]:
    """What the Pod Security Standard `restricted` (kubernetes.io, Pod Security Standards) refuses of a pod."""
    spec, found = template["spec"], []
    general = spec.get("securityContext", {})
    found += [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    kinds = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
    found += [f"volume {each['name']}" for each in spec.get("volumes", []) if not kinds & set(each)]
    for each in containers(template):
        context = {**general, **each.get("securityContext", {})}
        if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
            found.append("privileges")
        if "ALL" not in context.get("capabilities", {}).get("drop", []) or context["capabilities"].get("add"):
            found.append("capabilities")
        if context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0:
            found.append("root")
        if context.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            found.append("seccomp")
        found += ["hostPort" for port in each.get("ports", []) if "hostPort" in port]
    return found


def test_every_pod_conforms_to_the_restricted_standard(objects: list[Object]) -> None:
    for _, name, template in pods(objects):
        assert restricted_faults(template) == [], name
    for name, template in ours(objects).items():
        context = template["spec"]["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (10001, 10001, 10001), name
        for each in containers(template):
            assert each["securityContext"]["readOnlyRootFilesystem"] is True, name


def test_the_canary_is_a_pod_like_the_migration_s_and_may_do_what_mending_may(objects: list[Object]) -> None:
    """It is in no overlay, so nothing else would say that the namespace refuses it."""
    canary = yaml.safe_load((K8S / "canary.yaml").read_text())
    like, template = named(objects, "Job")["migrate"], canary["spec"]["template"]
    ((container,), (as_of,)) = template["spec"]["containers"], like["spec"]["template"]["spec"]["containers"]

    assert (canary["kind"], canary["metadata"]["namespace"]) == ("Job", "geo-assets")
    assert restricted_faults(template) == []
    # No key but those that the API takes of the migration's Job.
    assert set(canary["spec"]) == set(like["spec"])
    assert set(template["spec"]) == set(like["spec"]["template"]["spec"])
    assert set(container) == set(as_of)
    for key in ("serviceAccountName", "automountServiceAccountToken", "securityContext", "volumes"):
        assert template["spec"][key] == like["spec"]["template"]["spec"][key], key
    for key in ("envFrom", "securityContext", "volumeMounts"):
        assert container[key] == as_of[key], key
    assert template["spec"]["serviceAccountName"] in named(objects, "ServiceAccount")
    mend = components_of(objects)["mend"]["metadata"]["labels"]
    assert template["metadata"]["labels"][COMPONENT] == mend[COMPONENT], "policies know it by this"
    assert mebibytes(container["resources"]["requests"]["memory"]) <= mebibytes(
        container["resources"]["limits"]["memory"]
    )
    # The documentation's command puts the new image here.
    assert len(re.findall(r"image: geo-assets$", (K8S / "canary.yaml").read_text(), re.MULTILINE)) == 1


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("securityContext", "runAsNonRoot"), False),
        (("securityContext", "seccompProfile"), {}),
        (("containers", 0, "securityContext", "allowPrivilegeEscalation"), True),
        (("containers", 0, "securityContext", "capabilities"), {}),
        (("volumes",), [{"name": "host", "hostPath": {"path": "/"}}]),
        (("hostNetwork",), True),
    ],
)
def test_a_pod_that_does_not_conform_is_noticed(
    variants: dict[str, list[Object]], where: tuple[Any, ...], value: Any
) -> None:
    template = json.loads(json.dumps(ours(variants["aws"])["edge"]))
    place = template["spec"]
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    assert len(restricted_faults(template)) == 1


def test_only_what_launches_runs_has_a_token_of_the_api(objects: list[Object]) -> None:
    for each in named(objects, "ServiceAccount").values():
        assert each["automountServiceAccountToken"] is False
    told = {
        name: (template["spec"].get("serviceAccountName"), template["spec"]["automountServiceAccountToken"])
        for _, name, template in pods(objects)
    }
    launching = {"dagster-webserver", "dagster-daemon", "janitor"}
    assert {name for name, (_, token) in told.items() if token} == launching
    assert {name for name, (account, _) in told.items() if account == "control"} == launching
    # Each role has an account of its own, so that a cloud can give the tile server what only reads.
    for name in ("edge", "ingest", "live", "tiles", "code"):
        assert told[name][0] == name
    assert {told[name][0] for name in ("migrate", "mend")} == {"upkeep"}
    accounts = {"control", "code", "edge", "ingest", "live", "tiles", "upkeep", "batch", "run"}
    proxy = {"ui-proxy"} & set(told)
    assert set(named(objects, "ServiceAccount")) == accounts | proxy


def test_in_aws_each_account_has_a_role_of_its_name(variants: dict[str, list[Object]]) -> None:
    for name, account in named(variants["aws"], "ServiceAccount").items():
        role = account["metadata"]["annotations"]["eks.amazonaws.com/role-arn"]
        assert role.endswith(f":role/geo-assets-{name}")


def test_a_batch_runs_as_an_account_that_the_launcher_knows(objects: list[Object]) -> None:
    instance = yaml.safe_load(named(objects, "ConfigMap")["dagster-instance"]["data"]["dagster.yaml"])
    launcher = instance["run_launcher"]["config"]
    account = settings_of(objects)["GEO_ASSETS_RUN_POD_ACCOUNT"]

    assert account in launcher["run_service_accounts"]
    assert account != launcher["service_account_name"]
    assert set(launcher["run_service_accounts"]) <= set(named(objects, "ServiceAccount"))


def test_the_launchers_role_lets_it_make_and_end_jobs_and_read_no_secret(objects: list[Object]) -> None:
    (role,) = named(objects, "Role").values()
    (binding,) = named(objects, "RoleBinding").values()
    granted = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    needed = {("jobs", "create"), ("jobs", "delete"), ("jobs/status", "get"), ("pods", "list"), ("pods", "delete")}
    told = {("jobs", "get"), ("jobs", "list"), ("pods", "get"), ("pods/log", "get"), ("events", "list")}

    assert needed <= granted <= needed | told
    assert [each["name"] for each in binding["subjects"]] == ["control"]
    assert not [each for each in objects if each["kind"].startswith("ClusterRole")]


def test_every_container_is_watched_and_bounded(objects: list[Object]) -> None:
    for kind, name, template in pods(objects):
        assert template["spec"]["enableServiceLinks"] is False, f"{name}: KAFKA_PORT and the like would be variables"
        for each in containers(template):
            resources = each["resources"]
            assert {"cpu", "memory"} <= set(resources["requests"]), name
            assert mebibytes(resources["requests"]["memory"]) <= mebibytes(resources["limits"]["memory"]), name
            assert "cpu" not in resources["limits"], f"{name}: it would be slowed down while cores are idle"
            probes = {"startupProbe", "livenessProbe", "readinessProbe"} & set(each)
            if kind in ("Deployment", "StatefulSet"):
                # Nobody sends the daemon requests.
                without = {"readinessProbe"} if name == "dagster-daemon" else set()
                assert probes == {"startupProbe", "livenessProbe", "readinessProbe"} - without, name
            else:
                assert not probes, name
        for volume in template["spec"].get("volumes", []):
            if "emptyDir" in volume:
                assert mebibytes(volume["emptyDir"]["sizeLimit"]) > 0, (name, volume["name"])


def test_liveness_gives_a_busy_process_a_minute_and_a_shared_outage_takes_no_http_service_out(
    objects: list[Object],
) -> None:
    for name, template in ours(objects).items():
        (container,) = template["spec"]["containers"]
        live = container.get("livenessProbe")
        if live is not None:
            assert live["periodSeconds"] * live["failureThreshold"] >= 60, name
            assert live.get("httpGet", {}).get("path") != "/readyz", "who is restarted mends no shared outage"
    for name in ("edge", "tiles"):
        (container,) = ours(objects)[name]["spec"]["containers"]
        assert container["startupProbe"]["httpGet"]["path"] == "/readyz"
        assert container["readinessProbe"]["httpGet"]["path"] == "/healthz"
    for name in ("ingest", "live"):
        (container,) = ours(objects)[name]["spec"]["containers"]
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_a_pod_that_ends_has_as_long_as_its_service_takes_to(objects: list[Object]) -> None:
    settings = settings_of(objects)
    delay, drain = (float(settings[f"GEO_ASSETS_{name}_S"]) for name in ("SHUTDOWN_DELAY", "DRAIN"))
    for name in ("edge", "tiles", "ingest", "live"):
        takes = drain + LAST_S + (delay if name in ("edge", "tiles") else 0)
        assert ours(objects)[name]["spec"]["terminationGracePeriodSeconds"] > takes, name


def test_a_roll_out_takes_nothing_away_before_its_successor_is_ready(objects: list[Object]) -> None:
    budgets = named(objects, "PodDisruptionBudget")
    for name, each in named(objects, "Deployment").items():
        strategy = each["spec"]["strategy"]
        if name == "dagster-daemon":
            assert strategy == {"type": "Recreate"}, "never two daemons"
            assert each["spec"]["replicas"] == 1
        else:
            assert strategy["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}, name
        if name in ROLES:
            assert matches(budgets[name]["spec"]["selector"], each["spec"]["template"]["metadata"]["labels"])
            assert budgets[name]["spec"]["maxUnavailable"] == 1, "none would hold up a node that is emptied for ever"


def test_what_there_are_two_of_is_spread(variants: dict[str, list[Object]]) -> None:
    deployments = named(variants["lab"], "Deployment")
    two = {name for name, each in deployments.items() if each["spec"]["replicas"] == 2}
    assert two == {"edge", "ingest", "live", "tiles"}
    for name in two:
        template = deployments[name]["spec"]["template"]
        for each in template["spec"]["topologySpreadConstraints"]:
            assert matches(each["labelSelector"], template["metadata"]["labels"]), name


def test_the_image_is_one_and_each_process_knows_its_digest(objects: list[Object], request: Any) -> None:
    images = {template["spec"]["containers"][0]["image"] for template in ours(objects).values()}
    assert len(images) == 1
    (image,) = images
    for name, template in ours(objects).items():
        first, *rest = template["spec"]["containers"][0]["env"]
        assert first["name"] == "GEO_ASSETS_IMAGE_DIGEST", name
        assert first["value"] == (image.partition("@")[2] or "local"), name
        if name in ("code", "dagster-webserver", "dagster-daemon", "janitor"):
            assert {"name": "DAGSTER_CURRENT_IMAGE", "value": image} in rest, name
    for _, name, template in pods(objects):
        for each in containers(template):
            _, _, tag = each["image"].rpartition(":")
            assert re.match(r"v?\d|local$|lab$|[0-9a-f]{64}$", tag), (name, each["image"])


def test_a_role_gets_a_slim_image_as_the_documentation_says(k8s: Path) -> None:
    text = (DEPLOY.parent / "docs/operations.md").read_text()
    (shown,) = re.findall(r"^```yaml\n(patches:\n.*?)^```", text, re.DOTALL | re.MULTILINE)
    folder = k8s / "overlays/slim"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text("resources: [../aws]\n" + shown.replace("…", "1" * 64))

    images = {name: each["spec"]["containers"][0]["image"] for name, each in ours(build(folder)).items()}

    assert images.pop("edge") == f"registry.example/geo-assets-edge@sha256:{'1' * 64}"
    assert len(set(images.values())) == 1


def test_the_commands_exist(variants: dict[str, list[Object]]) -> None:
    from geo_assets.cli import app

    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for name, template in ours(variants["aws"]).items():
        program, command, *rest = template["spec"]["containers"][0]["command"]
        if program == "geo-assets":
            assert command in commands, name
        elif program == "python":
            assert command == "-m"
            assert importlib.util.find_spec(rest[0]) is not None, name
        else:
            assert (Path(sys.executable).parent / program).exists(), name


# -- configuration -------------------------------------------------------------------------------------------------


def secrets_used(objects: list[Object]) -> set[str]:
    found = set()
    for _, _, template in pods(objects):
        for each in containers(template):
            found |= {source["secretRef"]["name"] for source in each.get("envFrom", []) if "secretRef" in source}
            assert not [one for one in each.get("env", []) if "secretKeyRef" in one.get("valueFrom", {})]
        found |= {one["secret"]["secretName"] for one in template["spec"].get("volumes", []) if "secret" in one}
    for each in named(objects, "Ingress").values():
        found |= {one["secretName"] for one in each["spec"].get("tls", [])}
        oidc = each["metadata"].get("annotations", {}).get("alb.ingress.kubernetes.io/auth-idp-oidc", "{}")
        found |= {value for key, value in json.loads(oidc).items() if key == "secretName"}
    return found


def test_every_secret_that_is_used_is_made_here_or_documented(objects: list[Object]) -> None:
    made = set(named(objects, "Secret"))
    assert [name for name in secrets_used(objects) - made if f"`{name}`" not in DOCUMENTED] == []


def test_every_config_map_that_is_used_is_there_with_its_keys(objects: list[Object]) -> None:
    made = named(objects, "ConfigMap")
    for _, name, template in pods(objects):
        for each in containers(template):
            for source in each.get("envFrom", []):
                assert source.get("configMapRef", {"name": "geo-assets-settings"})["name"] in made, name
        volumes = {one["name"]: one for one in template["spec"].get("volumes", [])}
        claims = {"data"} if name in named(objects, "StatefulSet") else set()
        mounted = {one["name"]: one for each in containers(template) for one in each.get("volumeMounts", [])}
        assert set(mounted) - claims == set(volumes), name
        for volume, mount in mounted.items():
            source = volumes.get(volume, {}).get("configMap")
            if source is not None:
                assert source["name"] in made, name
                assert mount.get("subPath", next(iter(made[source["name"]]["data"]))) in made[source["name"]]["data"]


def files_at(template: Object) -> dict[str, str]:
    """Where a pod's first container has which ConfigMap."""
    maps = {one["name"]: one["configMap"]["name"] for one in template["spec"]["volumes"] if "configMap" in one}
    (container,) = template["spec"]["containers"]
    return {each["mountPath"]: maps[each["name"]] for each in container["volumeMounts"] if each["name"] in maps}


def test_every_pod_that_is_given_postgres_has_the_files_that_settings_name(objects: list[Object]) -> None:
    """Settings are the same for all, and say that the authorities of servers are in /etc/geo_assets."""
    for name, template in ours(objects).items():
        sources = template["spec"]["containers"][0]["envFrom"]
        given = {one["name"] for source in sources for one in source.values()}
        assert {"geo-assets-settings", "geo-assets-postgres"} <= given, name
        assert files_at(template).get("/etc/geo_assets") == "geo-assets-files", name
    instance = yaml.safe_load(named(objects, "ConfigMap")["dagster-instance"]["data"]["dagster.yaml"])
    launcher = instance["run_launcher"]["config"]
    of_runs = {each["name"]: each["config_map"]["name"] for each in launcher["volumes"] if "config_map" in each}
    mounted = {each["mount_path"]: of_runs.get(each["name"]) for each in launcher["volume_mounts"]}
    assert mounted["/etc/geo_assets"] == "geo-assets-files"


def test_nothing_secret_stands_in_what_is_no_secret(objects: list[Object]) -> None:
    for each in named(objects, "ConfigMap").values():
        assert not SECRET & set(each["data"]), each["metadata"]["name"]
    for name, value in settings_of(objects).items():
        assert not re.search("PASSWORD|SECRET|TOKEN|ACCESS_KEY", name), name
        assert not re.search(r"://[^/]*@", value), name
    for _, name, template in pods(objects):
        for each in containers(template):
            for variable in each.get("env", []):
                assert not re.search("PASSWORD|SECRET|TOKEN|ACCESS_KEY", variable["name"]), (name, variable)
                assert not re.search(r"://[^/]*@", variable.get("value", "")), (name, variable)
            assert not re.search(r"://[^/ ]*:[^/ ]*@", str(each.get("command", each.get("args")))), name


def test_secrets_are_made_for_this_machine_alone(variants: dict[str, list[Object]]) -> None:
    for name in ("aws", "lab", "aws, everything"):
        assert not named(variants[name], "Secret"), name
    assert set(named(variants["local"], "Secret")) == secrets_used(variants["local"]) - {"geo-assets-alerts"}


@pytest.mark.parametrize("name", ["aws", "local"])
def test_with_its_secrets_an_overlay_is_a_production_stack(
    name: str, variants: dict[str, list[Object]], k8s: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in list(os.environ):
        if variable.startswith("GEO_ASSETS_"):
            monkeypatch.delenv(variable)
    values = dict(settings_of(variants[name]))
    if name == "local":
        for file in (k8s / "overlays/local/secrets").glob("*.env"):
            values |= read(file)[0]
    else:
        shown = read(DEPLOY / "settings/aws.env")[1]
        values |= {each: shown[each] for each in SECRET if each in shown}
    for variable, value in values.items():
        monkeypatch.setenv(variable, value)

    found = Settings()

    assert found.stack == "production"
    assert found.host == "0.0.0.0"
    assert not found.shows_devices, "the map page is everybody's"
    services = named(variants[name], "Service")
    if name == "local":
        for url in (found.redis_url, found.postgres_url, found.dagster_postgres_url):
            assert url is not None
            assert url.get_secret_value().rpartition("@")[2].partition(":")[0] in services
        assert (found.kafka_servers or "").partition(":")[0] in services


@pytest.mark.parametrize(("overlay", "example"), [("aws", "aws"), ("local", "local"), ("lab", "local")])
def test_settings_are_those_of_the_examples(overlay: str, example: str, variants: dict[str, list[Object]]) -> None:
    active, _ = read(DEPLOY / "settings" / f"{example}.env")
    found = settings_of(variants[overlay])
    # A load balancer takes longer; and in the lab no cache is purged.
    other = {"aws": {"GEO_ASSETS_SHUTDOWN_DELAY_S"}, "lab": {"GEO_ASSETS_PURGE_URLS"}}.get(overlay, set())
    assert {name for name, value in active.items() if found.get(name) != value} == other
    known = {f"GEO_ASSETS_{name.upper()}" for name in Settings.model_fields}
    known |= {"GEO_ASSETS_LOGS_BUCKET", "GEO_ASSETS_LOGS_PREFIX"}
    assert [name for name in found if name.startswith("GEO_ASSETS_") and name not in known] == []


def test_what_is_generated_is_what_its_source_says(tmp_path: Path) -> None:
    def check(root: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(root / "deploy/k8s/generate"), "--check"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    fresh = check(DEPLOY.parent)
    assert (fresh.returncode, fresh.stdout) == (0, ""), "run deploy/k8s/generate"

    copy_with_secrets(tmp_path / "deploy")
    (tmp_path / "geo_assets/sample").mkdir(parents=True)
    (tmp_path / "geo_assets/sample/layers.yaml").write_text((K8S / "base/files/layers.yaml").read_text())
    rules = tmp_path / "deploy/prometheus/rules.yml"
    rules.write_text(rules.read_text().replace("for: 1m", "for: 9m", 1))
    stale = check(tmp_path)
    assert (stale.returncode, stale.stdout.split()) == (1, ["deploy/k8s/components/monitoring/rules.yaml"])


def test_rules_and_dashboard_are_the_projects_own(variants: dict[str, list[Object]]) -> None:
    objects = variants["aws, everything"]
    rules = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())
    assert named(objects, "PrometheusRule")["geo-assets"]["spec"] == rules
    dashboard = named(objects, "ConfigMap")["geo-assets-dashboard"]
    assert dashboard["data"]["geo_assets.json"] == (DEPLOY / "grafana/geo_assets.json").read_text()
    # kubectl keeps what it applied in an annotation, which may have 256 KiB.
    assert len(json.dumps(dashboard)) < 250_000


def test_this_machines_services_are_those_of_compose(variants: dict[str, list[Object]]) -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    templates = components_of(variants["local"])
    for name in ("kafka", "redis", "postgres", "s3", "bucket", "cache"):
        assert templates[name]["spec"]["containers"][0]["image"] == compose[name]["image"]
    maps = named(variants["local"], "ConfigMap")
    for file in ("default.vcl", "rules.vcl"):
        assert maps["cache-rules"]["data"][file] == (DEPLOY / "varnish" / file).read_text()
    assert maps["postgres-init"]["data"]["20-geo_assets.sh"] == (DEPLOY / "postgres/init.sh").read_text()


def test_secrets_are_their_owners_alone_new_each_time_and_never_replaced(tmp_path: Path) -> None:
    script = K8S / "overlays/local/make-secrets"

    def make(folder: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, check=False)

    assert make(tmp_path / "one").returncode == 0
    assert make(tmp_path / "two").returncode == 0
    before = {path.name: path.read_text() for path in (tmp_path / "one").iterdir()}
    again = make(tmp_path / "one")

    assert (again.returncode, len(again.stderr.splitlines())) == (1, 1)
    assert {path.name: path.read_text() for path in (tmp_path / "one").iterdir()} == before
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "one").iterdir()} == {0o600}
    same = [name for name, text in before.items() if (tmp_path / "two" / name).read_text() == text]
    assert same == ["kafka.env"]
    ignored = subprocess.run(
        ["git", "check-ignore", "-q", "deploy/k8s/overlays/local/secrets/s3.env"],
        cwd=DEPLOY.parent,
        capture_output=True,
        check=False,
    )
    # Outside of a checkout git says 128.
    assert ignored.returncode != 1


# -- how they find each other --------------------------------------------------------------------------------------


def ports_of(template: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for each in containers(template) for port in each.get("ports", [])}


def test_every_selector_finds_what_it_is_for(objects: list[Object]) -> None:
    templates = components_of(objects)
    for kind, name, template in pods(objects):
        workload = named(objects, kind)[name]
        if kind in ("Deployment", "StatefulSet"):
            assert matches(workload["spec"]["selector"], template["metadata"]["labels"]), name
    for name, service in named(objects, "Service").items():
        if name == "nowhere":
            continue
        found = [
            each
            for each in templates.values()
            if matches({"matchLabels": service["spec"]["selector"]}, each["metadata"]["labels"])
        ]
        assert len(found) == 1, name
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports_of(found[0]), (name, port)
    for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        for name, each in named(objects, kind).items():
            target = named(objects, "Deployment")[each["spec"]["scaleTargetRef"]["name"]]
            assert "replicas" not in target["spec"], f"{name}: a deployment would set back what was scaled"


def test_every_port_is_what_the_settings_say(objects: list[Object]) -> None:
    settings, templates = settings_of(objects), components_of(objects)
    for name in ("edge", "tiles", "ingest", "live"):
        assert list(ports_of(templates[name]).values()) == [int(settings[f"GEO_ASSETS_{name.upper()}_PORT"])]
    assert ports_of(templates["dagster-webserver"]) == {"http": int(settings["GEO_ASSETS_DAGSTER_PORT"])}
    command = " ".join(templates["dagster-webserver"]["spec"]["containers"][0]["command"])
    assert f"--port={settings['GEO_ASSETS_DAGSTER_PORT']}" in command
    assert f"--port={ports_of(templates['code'])['grpc']}" in templates["code"]["spec"]["containers"][0]["command"]
    workspace = yaml.safe_load(named(objects, "ConfigMap")["dagster-instance"]["data"]["workspace.yaml"])
    server = workspace["load_from"][0]["grpc_server"]
    assert (server["host"], server["port"]) == ("code", ports_of(templates["code"])["grpc"])
    service = named(objects, "Service")["code"]["spec"]["ports"]
    assert [port["port"] for port in service] == [server["port"]]


def test_the_instance_names_accounts_maps_and_secrets_that_are_there(objects: list[Object]) -> None:
    instance = yaml.safe_load(named(objects, "ConfigMap")["dagster-instance"]["data"]["dagster.yaml"])
    launcher = instance["run_launcher"]["config"]
    maps = set(named(objects, "ConfigMap"))

    assert launcher["service_account_name"] in named(objects, "ServiceAccount")
    assert {*launcher["env_config_maps"], launcher["instance_config_map"]} <= maps
    assert {each["config_map"]["name"] for each in launcher["volumes"] if "config_map" in each} <= maps
    assert [name for name in launcher["env_secrets"] if f"`{name}`" not in DOCUMENTED] == []
    assert launcher["labels"][COMPONENT] == "run"
    given = {"GEO_ASSETS_DAGSTER_POSTGRES_URL", "DAGSTER_CURRENT_IMAGE", *settings_of(objects)}
    named_variables = re.findall(
        r"\{env: (\w+)\}", named(objects, "ConfigMap")["dagster-instance"]["data"]["dagster.yaml"]
    )
    assert set(named_variables) <= given


# -- who may talk to whom ------------------------------------------------------------------------------------------


def peers(rule: Object, side: str, template: Object) -> bool:
    """Whether a rule names a pod of this namespace."""
    return side not in rule or any(
        "podSelector" in each
        and "namespaceSelector" not in each
        and matches(each["podSelector"], template["metadata"]["labels"])
        for each in rule[side]
    )


def may_talk(objects: list[Object], source: str, target: str, port: int) -> bool:
    """Whether the policies let a pod open a connection to another's port, as the API's documentation defines it."""
    templates = components_of(objects)
    ends = (("Egress", "egress", "to", source, target), ("Ingress", "ingress", "from", target, source))
    for kind, key, side, subject, peer in ends:
        policies = [
            each["spec"]
            for each in named(objects, "NetworkPolicy").values()
            if kind in each["spec"]["policyTypes"]
            and matches(each["spec"]["podSelector"], templates[subject]["metadata"]["labels"])
        ]
        assert policies, "everything is denied first"
        if not any(
            peers(rule, side, templates[peer])
            and any(each["port"] == port for each in rule.get("ports", [{"port": port}]))
            for each in policies
            for rule in each.get(key, [])
        ):
            return False
    return True


def test_policies_name_components_and_ports_that_there_are(objects: list[Object]) -> None:
    templates = components_of(objects)
    known_ports = {port for template in templates.values() for port in ports_of(template).values()}
    # Of services elsewhere, names, the API, a cache of one's own, and a routing run's metrics.
    known_ports |= {53, 443, 6443, 5432, 6379, 9096, 9098, 6081, 8790}
    for name, policy in named(objects, "NetworkPolicy").items():
        text = json.dumps(policy["spec"])
        chosen = re.findall(r'"app\.kubernetes\.io/component": "([\w-]+)"', text)
        for values in re.findall(r'"operator": "In", "values": \[([^]]*)\]', text):
            chosen += re.findall(r'"([\w-]+)"', values)
        assert set(chosen) <= set(templates), name
        assert {int(port) for port in re.findall(r'"port": (\d+)', text)} <= known_ports, name


def test_everything_is_denied_first(objects: list[Object]) -> None:
    spec = named(objects, "NetworkPolicy")["deny-all"]["spec"]
    assert (spec["podSelector"], set(spec["policyTypes"])) == ({}, {"Ingress", "Egress"})
    assert not {"ingress", "egress"} & set(spec)


def test_the_code_server_answers_dagster_alone(objects: list[Object]) -> None:
    allowed = {name for name in components_of(objects) if may_talk(objects, name, "code", 4000)}
    assert allowed == {"dagster-webserver", "dagster-daemon"}


@pytest.mark.parametrize("name", OVERLAYS)
def test_without_a_component_nothing_leads_to_the_ui(name: str, variants: dict[str, list[Object]]) -> None:
    objects = variants[name]
    assert [each for each in components_of(objects) if may_talk(objects, each, "dagster-webserver", 3000)] == []
    for policy in named(objects, "NetworkPolicy").values():
        chosen = components_of(objects)["dagster-webserver"]["metadata"]["labels"]
        if matches(policy["spec"]["podSelector"], chosen):
            assert not policy["spec"].get("ingress"), policy["metadata"]["name"]
    assert "dagster-webserver" not in json.dumps([each["spec"] for each in named(objects, "Ingress").values()])
    assert {each["spec"].get("type", "ClusterIP") for each in named(objects, "Service").values()} == {"ClusterIP"}


def test_whoever_comes_to_the_ui_was_asked_who_they_are(variants: dict[str, list[Object]]) -> None:
    objects = variants["local, everything"]
    assert [each for each in components_of(objects) if may_talk(objects, each, "dagster-webserver", 3000)] == [
        "ui-proxy"
    ]
    backend = named(objects, "Ingress")["ui"]["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]["name"]
    assert backend == "ui-proxy"

    annotations = named(variants["aws, everything"], "Ingress")["ui"]["metadata"]["annotations"]
    prefix = "alb.ingress.kubernetes.io/"
    assert annotations[prefix + "auth-type"] == "oidc"
    assert annotations[prefix + "auth-on-unauthenticated-request"] == "authenticate"
    assert json.loads(annotations[prefix + "listen-ports"]) == [{"HTTPS": 443}]
    # Not the one of edge and tiles, whose rules would stand beside it.
    assert (
        annotations[prefix + "group.name"]
        != named(variants["aws, everything"], "Ingress")["tiles"]["metadata"]["annotations"][prefix + "group.name"]
    )


def test_what_comes_in_comes_by_tls_and_sees_no_metrics(objects: list[Object]) -> None:
    for name, each in named(objects, "Ingress").items():
        annotations = each["metadata"]["annotations"]
        if each["spec"]["ingressClassName"] == "alb":
            assert '{"HTTPS": 443}' in annotations["alb.ingress.kubernetes.io/listen-ports"], name
            assert annotations["alb.ingress.kubernetes.io/certificate-arn"]
        else:
            hosts = {host for one in each["spec"]["tls"] for host in one["hosts"]}
            assert hosts == {rule["host"] for rule in each["spec"]["rules"]}, name
        for path in (path for rule in each["spec"]["rules"] for path in rule["http"]["paths"]):
            service = path["backend"]["service"]
            if service["name"] == "hidden":
                assert annotations["alb.ingress.kubernetes.io/actions.hidden"]
                continue
            ports = named(objects, "Service")[service["name"]]["spec"]["ports"]
            assert service["port"].get("name") in {port.get("name") for port in ports} or service["name"] == "nowhere"
            if service["name"] == "edge":
                assert path["path"] == "/v1/"
        if name == "tiles":
            paths = {path["path"]: path for rule in each["spec"]["rules"] for path in rule["http"]["paths"]}
            assert paths["/metrics"]["backend"]["service"]["name"] in ("nowhere", "hidden")


def test_in_one_namespace_each_reaches_what_it_needs(variants: dict[str, list[Object]]) -> None:
    objects = variants["local, everything"]
    platform = sorted(ROLES | {"migrate", "mend", "janitor", "run"})
    for source in platform:
        for target, port in (("kafka", 9092), ("redis", 6379), ("postgres", 5432), ("s3", 8333), ("cache", 8080)):
            assert may_talk(objects, source, target, port), (source, target)
    assert may_talk(objects, "cache", "tiles", 8788)
    assert may_talk(objects, "kafka", "kafka", 9092)
    assert may_talk(objects, "bucket", "s3", 9333)
    assert not may_talk(objects, "edge", "ingest", 8789)
    assert not may_talk(objects, "cache", "postgres", 5432)
    assert not may_talk(objects, "redis", "postgres", 5432)


@pytest.mark.parametrize("name", ["aws", "aws, everything"])
def test_a_pod_does_not_reach_its_nodes_own_credentials(name: str, variants: dict[str, list[Object]]) -> None:
    for policy in named(variants[name], "NetworkPolicy").values():
        for rule in policy["spec"].get("egress", []):
            for each in rule.get("to", []):
                block = each.get("ipBlock", {})
                if block.get("cidr") == "0.0.0.0/0":
                    assert "169.254.0.0/16" in block["except"]


@pytest.mark.parametrize(("name", "gets_out"), [("aws", True), ("local", False)])
def test_the_code_server_reaches_webhooks_where_the_documentation_says(
    name: str, gets_out: bool, variants: dict[str, list[Object]]
) -> None:
    labels = components_of(variants[name])["code"]["metadata"]["labels"]
    ports = [
        port["port"]
        for policy in named(variants[name], "NetworkPolicy").values()
        if matches(policy["spec"]["podSelector"], labels)
        for rule in policy["spec"].get("egress", [])
        if not any("podSelector" in peer for peer in rule.get("to", []))
        for port in rule["ports"]
    ]
    assert (443 in ports) is gets_out


def test_prometheus_finds_every_service_under_the_name_that_the_rules_know(
    variants: dict[str, list[Object]],
) -> None:
    objects = variants["aws, everything"]
    monitor = named(objects, "PodMonitor")["services"]["spec"]
    chosen = {
        name: ports_of(template)
        for name, template in components_of(objects).items()
        if matches(monitor["selector"], template["metadata"]["labels"])
    }
    jobs = {
        each["job_name"]
        for each in yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    }
    assert monitor["jobLabel"] == COMPONENT
    assert set(chosen) == jobs - {"routing"}
    ends = {each["port"] for each in monitor["podMetricsEndpoints"]}
    assert all(len(ends & set(ports)) == 1 for ports in chosen.values())
    allowed = {each["port"] for each in named(objects, "NetworkPolicy")["prometheus"]["spec"]["ingress"][0]["ports"]}
    assert {port for ports in chosen.values() for port in ports.values()} < allowed
    routing = named(objects, "PodMonitor")["routing"]["spec"]["podMetricsEndpoints"][0]["relabelings"]
    port = settings_of(objects)["GEO_ASSETS_GEOFENCE_METRICS_PORT"]
    assert routing[-1]["replacement"].endswith(f":{port}")
    assert int(port) in allowed


# -- sizes ---------------------------------------------------------------------------------------------------------


def test_the_quota_has_room_for_everything_at_its_most_and_for_every_run(variants: dict[str, list[Object]]) -> None:
    objects = variants["aws, everything"]
    hard = named(objects, "ResourceQuota")["geo-assets"]["spec"]["hard"]
    most = {
        each["spec"]["scaleTargetRef"]["name"]: each["spec"].get("maxReplicas", each["spec"].get("maxReplicaCount"))
        for kind in ("HorizontalPodAutoscaler", "ScaledObject")
        for each in named(objects, kind).values()
    }
    instance = yaml.safe_load(named(objects, "ConfigMap")["dagster-instance"]["data"]["dagster.yaml"])
    runs = instance["concurrency"]["runs"]["max_concurrent_runs"]
    of_run = instance["run_launcher"]["config"]["resources"]
    cpu, asked = runs * cores(of_run["requests"]["cpu"]), runs * mebibytes(of_run["requests"]["memory"])
    told = f"{cpu:g} CPU and {asked / 1024:g} GiB"
    resting_cpu, resting, roles_cpu, roles = 0.0, 0.0, -cpu, -asked
    limit, count = runs * mebibytes(of_run["limits"]["memory"]), runs
    for name, each in named(objects, "Deployment").items():
        # One more while it is rolled out.
        copies = most.get(name, each["spec"].get("replicas")) + 1
        (container,) = each["spec"]["template"]["spec"]["containers"]
        cpu += copies * cores(container["resources"]["requests"]["cpu"])
        asked += copies * mebibytes(container["resources"]["requests"]["memory"])
        resting_cpu += (copies - 1) * cores(container["resources"]["requests"]["cpu"])
        resting += (copies - 1) * mebibytes(container["resources"]["requests"]["memory"])
        limit += copies * mebibytes(container["resources"]["limits"]["memory"])
        count += copies

    assert cpu <= cores(hard["requests.cpu"])
    assert asked <= mebibytes(hard["requests.memory"])
    assert limit <= mebibytes(hard["limits.memory"])
    assert count + 10 <= int(hard["pods"])

    # What the file says of itself.
    comment = " ".join((K8S / "base/limits.yaml").read_text().partition("apiVersion")[0].replace("#", " ").split())
    roles_cpu, roles = roles_cpu + cpu, (roles + asked) / 1024
    assert f"nine runs (dagster.yaml: max_concurrent_runs) for {told}" in comment
    assert (
        f"ask for {resting_cpu:.1f} CPU and {resting / 1024:.1f} GiB, and for {roles_cpu:.1f} and {roles:.1f}"
        in comment
    )
    most_of_run = Settings.model_fields["run_pod_most_mb"].default / 1024
    large = int((mebibytes(hard["requests.memory"]) - resting) / 1024 // most_of_run)
    assert (most_of_run, large) == (8, 4), "four of those fill the quota"


def test_the_documentations_table_has_the_sizes_that_are_set(variants: dict[str, list[Object]]) -> None:
    told = {
        name: (count, cpu, request, limit)
        for name, count, cpu, request, limit in re.findall(
            r"^\| `([\w-]+)` \| (\d) \| (\w+) \| (\w+) \| (\w+) \|", DOCUMENTED, re.MULTILINE
        )
    }
    base = build(K8S / "base")
    found = {}
    for _, name, template in pods(base):
        resources = template["spec"]["containers"][0]["resources"]
        replicas = str(named(base, "Deployment").get(name, {"spec": {"replicas": 1}})["spec"]["replicas"])
        found[name] = (
            replicas,
            resources["requests"]["cpu"],
            resources["requests"]["memory"],
            resources["limits"]["memory"],
        )
    assert told == found


def test_the_documentation_names_every_overlay_component_and_object_kind(objects: list[Object]) -> None:
    for name in (*(f"overlays/{each}" for each in OVERLAYS), *(f"components/{each}" for each in COMPONENTS)):
        assert name in DOCUMENTED
    assert {each["kind"] for each in objects} - set(re.findall(r"[A-Z]\w+", DOCUMENTED)) == set()
