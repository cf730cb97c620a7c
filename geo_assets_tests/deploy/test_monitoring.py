"""Prometheus' rules and the Grafana dashboard: sound, tested, and true of what running services expose.

A real Prometheus scrapes a real edge, ingest, tile server and routing run.
"""

# Members are named as Grafana names them.
# ruff: noqa: N815

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from geo_assets.events.signature import sign
from geo_assets_tests.deploy.examples import DEPLOY
from geo_assets_tests.needs import missing
from geo_assets_tests.own_redis import free_port
from geo_assets_tests.waiting import patient, until
from geo_assets_tests.world import LAYERS, SOURCES, feature

pytestmark = pytest.mark.timeout(600)

RULES = DEPLOY / "prometheus" / "rules.yml"
DASHBOARD = DEPLOY / "grafana" / "geo_assets.json"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

BUILT_IN = {"up", "ALERTS"}
"""Prometheus' own."""

NOT_OURS = re.compile(r"(process|python|go|scrape|promhttp|prometheus|net)_\w+|up|target_\w+")
"""What client libraries and Prometheus tell of themselves."""

TOLD_TWICE = {"ledger_dirty_tiles", "ledger_given_up_tiles", "ledger_oldest_dirty_seconds"}
"""By the tile server for installations that scrape it alone; ingest's figures of the same are the dashboard's."""


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        missing(f"no {name} (Debian and Ubuntu have it in the package prometheus)")
    return found


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(
        [program("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=patient(120)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


# -- rules ---------------------------------------------------------------------------------------------------------


def test_rules_and_scrape_config_are_sound() -> None:
    promtool("check", "rules", "--lint-fatal", RULES)
    promtool("check", "config", DEPLOY / "prometheus" / "prometheus.yml")


def test_every_alert_fires_in_its_story_and_is_quiet_in_the_other() -> None:
    promtool("test", "rules", DEPLOY / "prometheus" / "rules_test.yml")
    stories = yaml.safe_load((DEPLOY / "prometheus" / "rules_test.yml").read_text())["tests"]
    told = {(t["alertname"], bool(t["exp_alerts"])) for story in stories for t in story["alert_rule_test"]}
    assert told == {(rule["alert"], fires) for rule in rules() for fires in (True, False)}


def test_every_alert_says_what_it_means_and_how_bad_it_is() -> None:
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_the_documentation_names_every_alert() -> None:
    text = (DEPLOY.parent / "docs" / "alerts.md").read_text()
    assert [rule["alert"] for rule in rules() if f"`{rule['alert']}`" not in text] == []


# -- the dashboard's form ------------------------------------------------------------------------------------------


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DataSource(Strict):
    type: Literal["prometheus"]
    uid: Literal["${datasource}"]


class Grid(Strict):
    h: int = Field(ge=1)
    w: int = Field(ge=1, le=24)
    x: int = Field(ge=0, le=23)
    y: int = Field(ge=0)


class Target(Strict):
    refId: str = Field(pattern="^[A-Z]$")
    datasource: DataSource
    expr: str = Field(min_length=1)
    legendFormat: str
    instant: bool = False
    format: Literal["time_series", "table"] = "time_series"


class Step(Strict):
    color: str
    value: float | None


class Thresholds(Strict):
    mode: Literal["absolute", "percentage"]
    steps: list[Step] = Field(min_length=1)


class Defaults(Strict):
    unit: Literal["short", "s", "reqps", "Bps", "bytes", "percentunit"]
    min: float | None = None
    thresholds: Thresholds
    custom: dict[str, Any] = {}


class FieldConfig(Strict):
    defaults: Defaults
    overrides: list[Any]


class Panel(Strict):
    id: int
    type: Literal["timeseries", "stat", "table", "row"]
    title: str = Field(min_length=1)
    description: str = ""
    gridPos: Grid
    datasource: DataSource | None = None
    fieldConfig: FieldConfig | None = None
    options: dict[str, Any] = {}
    targets: list[Target] = []
    collapsed: bool | None = None
    panels: list[Any] | None = None


class Dashboard(Strict):
    """What Grafana's documentation of the dashboard JSON model names, as far as this one uses it."""

    uid: str = Field(pattern="^[a-zA-Z0-9_-]{1,40}$")
    title: str
    description: str
    tags: list[str]
    schemaVersion: int = Field(ge=36)
    version: int
    editable: bool
    graphTooltip: Literal[0, 1, 2]
    timezone: Literal["browser", "utc", ""]
    refresh: str
    time: dict[Literal["from", "to"], str]
    timepicker: dict[str, Any]
    annotations: dict[Literal["list"], list[Any]]
    links: list[Any]
    templating: dict[Literal["list"], list[dict[str, Any]]]
    panels: list[Panel]


def dashboard() -> Dashboard:
    return Dashboard.model_validate_json(DASHBOARD.read_text())


def expressions() -> list[str]:
    """Every expression of the dashboard, with an interval in the place of Grafana's."""
    return [
        target.expr.replace("$__rate_interval", "1m") for panel in dashboard().panels for target in panel.targets
    ]  # fmt: skip


def test_the_dashboard_is_of_the_form_that_grafana_reads() -> None:
    read = dashboard()
    assert len({panel.id for panel in read.panels}) == len(read.panels)
    assert [variable["name"] for variable in read.templating["list"]] == ["datasource"]
    taken: set[tuple[int, int]] = set()
    for panel in read.panels:
        grid = panel.gridPos
        assert grid.x + grid.w <= 24, panel.title
        cells = {(x, y) for x in range(grid.x, grid.x + grid.w) for y in range(grid.y, grid.y + grid.h)}
        assert not cells & taken, f"{panel.title} lies on another panel"
        taken |= cells
        assert (panel.type == "row") != bool(panel.targets), panel.title
        assert [target.refId for target in panel.targets] == [chr(65 + n) for n in range(len(panel.targets))]


def test_the_dashboard_has_every_stage() -> None:
    assert [panel.title for panel in dashboard().panels if panel.type == "row"] == [
        "At a glance", "Edge", "Ingest", "Fast lane", "Tiles", "Tile server", "Geofence", "Dead letters", "Alerts"
    ]  # fmt: skip


# -- against running services --------------------------------------------------------------------------------------


class Prometheus:
    """A real one, scraping real services."""

    def __init__(self, url: str, families: set[str]) -> None:
        self.url, self.families = url, families

    def get(self, path: str, **query: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=query, timeout=patient(30), trust_env=False).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def value(self, expression: str) -> list[dict[str, Any]]:
        return self.get("query", query=expression)["result"]


@contextmanager
def process(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        running = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(timeout=patient(30))
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    binary = program("prometheus")
    folder = tmp_path_factory.mktemp("monitoring")
    home = folder / "home"
    home.mkdir()
    (home / "layers.yaml").write_text(LAYERS)
    (home / "sources.yaml").write_text(SOURCES)
    ports = {name: free_port() for name in ("edge", "tiles", "ingest", "live", "routing", "prometheus")}
    environment = {
        **os.environ,
        "GEO_ASSETS_HOME": str(home),
        "GEO_ASSETS_LOG_PARTITIONS": "1",
        "GEO_ASSETS_INGEST_WORKERS": "1",
        **{f"GEO_ASSETS_{name.upper()}_PORT": str(ports[name]) for name in ("edge", "tiles", "ingest", "live")},
    }
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES)]
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [f"127.0.0.1:{ports[job['job_name']]}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    me = [sys.executable, "-m", "geo_assets.cli"]
    with ExitStack() as running:
        # One of them makes the files that all of them use.
        subprocess.run([*me, "migrate"], env=environment, check=True, capture_output=True, timeout=patient(120))
        for name in ("edge", "ingest", "tiles"):
            running.enter_context(process([*me, name], environment, folder / f"{name}.log"))
        route = [*me, "route", "--metrics-port", str(ports["routing"])]
        running.enter_context(process(route, environment, folder / "routing.log"))
        url = f"http://127.0.0.1:{ports['prometheus']}"
        command = [
            binary, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{ports['prometheus']}", "--log.level=warn",
        ]  # fmt: skip
        running.enter_context(process(command, environment, folder / "prometheus.log"))
        found = Prometheus(url, set())
        _wait(lambda: len(found.value("up == 1")) == 4, "every service answers a scrape", folder)
        _traffic(ports)
        _wait(
            lambda: bool(found.value('dead_letters_total{reason="invalid_geometry"} == 1')),
            "a letter is counted",
            folder,
        )
        _wait(lambda: bool(found.value('log_lag_records{topic="tiles"} > 0')), "hints wait", folder)
        # Nobody reads hints before the lane does.
        running.enter_context(process([*me, "live"], environment, folder / "live.log"))
        _wait(lambda: len(found.value("up == 1")) == 5, "the fast lane answers a scrape", folder)
        found.families |= {one["metric"] for one in found.get("targets/metadata", limit="100000")}
        yield found


def _traffic(ports: dict[str, int]) -> None:
    """An edit, one that dies, a tile."""
    crossed = feature(2, 1)
    ring = crossed["geometry"]["coordinates"][0]
    ring[1], ring[2] = ring[2], ring[1]
    for number, body in enumerate(json.dumps(one).encode() for one in (feature(1, 1), crossed)):
        headers = sign(SECRET, f"m{number}", int(time.time()), body)
        headers |= {"x-source": "city", "content-type": "application/geo+json"}
        url = f"http://127.0.0.1:{ports['edge']}/v1/features"
        assert httpx.post(url, content=body, headers=headers, trust_env=False, timeout=patient(30)).status_code == 202
    for path in ("tiles/14/9327/4741.mvt", "tiles.json"):
        httpx.get(f"http://127.0.0.1:{ports['tiles']}/{path}", trust_env=False, timeout=patient(30))


def _wait(done: Any, what: str, folder: Path) -> None:
    deadline = time.monotonic() + patient(180)
    while True:
        try:
            if done():
                return
        except (httpx.TransportError, json.JSONDecodeError):
            pass
        if time.monotonic() > deadline:
            logs = "\n".join(f"-- {log.name}\n{log.read_text()[-1_500:]}" for log in sorted(folder.glob("*.log")))
            raise AssertionError(f"not within {patient(180):g} s: {what}\n{logs}")
        time.sleep(0.3)


_LABELS = re.compile(r"\{[^}]*\}|\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)|\[[^\]]*\]|\"[^\"]*\"")
_NAME = re.compile(r"\b[a-zA-Z_:][a-zA-Z0-9_:]*\b(?!\s*\()")
_WORDS = {"and", "or", "unless", "bool", "by", "on", "without", "offset"}


def names_in(expression: str) -> set[str]:
    """The metrics of an expression."""
    return set(_NAME.findall(_LABELS.sub(" ", expression))) - _WORDS


def family_of(name: str, families: set[str]) -> str | None:
    """The family that a metric belongs to; counters and histograms have suffixes."""
    for known in (name, *(name.removesuffix(suffix) for suffix in ("_total", "_bucket", "_count", "_sum"))):
        if known in families:
            return known
    return None


def test_metrics_are_found_in_expressions() -> None:
    text = 'sum by (le) (rate(a_bucket{b="c"}[5m])) > 0.7 * scalar(max(d)) and on(e) f_total unless g'
    assert names_in(text) == {"a_bucket", "d", "f_total", "g"}


def test_prometheus_takes_every_expression_of_the_dashboard(prometheus: Prometheus) -> None:
    for expression in expressions():
        prometheus.value(expression)


def test_every_metric_of_dashboard_and_rules_is_exposed_by_a_running_service(prometheus: Prometheus) -> None:
    wanted = {name for text in (*expressions(), *(rule["expr"] for rule in rules())) for name in names_in(text)}
    assert {name for name in wanted - BUILT_IN if family_of(name, prometheus.families) is None} == set()


def test_everything_that_a_running_service_exposes_is_on_the_dashboard(prometheus: Prometheus) -> None:
    shown = {name for text in expressions() for name in names_in(text)}
    shown |= {family for name in shown if (family := family_of(name, prometheus.families)) is not None}
    # Services that write the newer format name a counter's family without its suffix.
    shown |= {name.removesuffix("_total") for name in shown}
    ours = {name for name in prometheus.families if not NOT_OURS.fullmatch(name) and not name.endswith("_created")}
    assert sorted(ours - shown) == sorted(TOLD_TWICE)


def test_every_rule_is_evaluated_and_none_fires_on_a_sound_platform(prometheus: Prometheus) -> None:
    def health() -> set[tuple[str, str]]:
        groups = prometheus.get("rules")["groups"]
        return {(rule["name"], rule["health"]) for group in groups for rule in group["rules"]}

    until(lambda: {word for _, word in health()} == {"ok"}, why="every rule was evaluated", every=0.3)
    assert health() == {(rule["alert"], "ok") for rule in rules()}
    firing = prometheus.value('ALERTS{alertstate="firing"}')
    assert [one["metric"]["alertname"] for one in firing] == []


def test_the_page_names_every_service_that_is_scraped() -> None:
    text = (DEPLOY.parent / "docs/alerts.md").read_text(encoding="utf-8")
    jobs = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    told = " ".join(text.partition("scrapes the containers of")[2].partition(". ")[0].split())
    words = {"tiles": "tile server", "routing": "routing run"}
    names: list[str] = [each["job_name"] for each in jobs]
    assert [name for name in names if words.get(name, name) not in told] == []
