"""deploy/compose.yaml: nothing beyond loopback, no secret inline, images pinned, and parts that work by themselves."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import typer
import yaml
from psycopg.conninfo import conninfo_to_dict

from geo_assets.settings import Settings
from geo_assets_tests.deploy.examples import DEPLOY, of_dagster, read
from geo_assets_tests.needs import missing
from scripts.local_services import MissingProgram, Services

COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PLATFORM = {name for name, service in SERVICES.items() if service["image"] == "geo-assets:local"}
ONCE = {"migrate", "bucket"}
"""What ends by itself, and is waited for until it has."""

SERVICE_KEYS = {
    *("image", "restart", "env_file", "environment", "command", "entrypoint", "ports", "volumes", "depends_on"),
    *("healthcheck", "shm_size", "cap_drop", "security_opt", "stop_grace_period"),
}


@pytest.fixture
def deployed(tmp_path: Path) -> Path:
    """A copy of the folder with secrets of its own."""
    folder = tmp_path / "deploy"
    shutil.copytree(DEPLOY, folder, ignore=shutil.ignore_patterns("secrets.env"))
    made = subprocess.run([sys.executable, str(folder / "make-secrets")], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return folder


def test_the_services_of_the_platform_and_those_it_needs_are_all_there() -> None:
    assert sorted(PLATFORM) == ["dagster-daemon", "dagster-webserver", "edge", "ingest", "live", "migrate", "tiles"]
    assert set(SERVICES) - PLATFORM == {"kafka", "redis", "postgres", "s3", "bucket", "cache"}
    assert set(COMPOSE) == {"name", "x-platform", "x-dagster", "services", "volumes"}


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_says_only_what_compose_knows(name: str) -> None:
    service = SERVICES[name]

    assert set(service) <= SERVICE_KEYS
    assert service["restart"] in ("no", "unless-stopped", "on-failure")
    for key in ("command", "entrypoint"):
        assert all(isinstance(part, str) for part in service.get(key, [])), f"{key} has a part that is no text"
    for value in service.get("environment", {}).values():
        assert isinstance(value, str), "YAML's own true and 1 are not what the image reads"


@pytest.mark.parametrize("name", SERVICES)
def test_each_image_is_pinned(name: str) -> None:
    image, _, tag = SERVICES[name]["image"].partition(":")

    assert tag == "local" if image == "geo-assets" else re.match(r"\d+\.?\d*", tag)


def test_ports_are_published_on_loopback_only_and_once() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    hosts = [port.rpartition(":")[0] for port in published]

    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in published)
    assert len(set(hosts)) == len(hosts)
    # The tile server is reached through the cache.
    assert "ports" not in SERVICES["tiles"]


def test_what_runs_on_has_a_health_check_and_what_is_waited_for_can_be() -> None:
    for name, service in SERVICES.items():
        assert ("healthcheck" in service) == (name not in ONCE), name
        for needed, wait in service.get("depends_on", {}).items():
            condition = wait["condition"]
            assert condition == ("service_completed_successfully" if needed in ONCE else "service_healthy"), name


def test_no_service_waits_for_itself() -> None:
    waits = {name: set(service.get("depends_on", {})) for name, service in SERVICES.items()}
    started: set[str] = set()
    while waits.keys() - started:
        ready = {name for name, needed in waits.items() if name not in started and needed <= started}
        assert ready, f"{set(waits) - started} wait for each other"
        started |= ready


def test_every_file_and_volume_that_is_mounted_is_there() -> None:
    used = {mount.split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", [])}
    files = {name for name in used if name.startswith(".")}

    assert used - files == set(COMPOSE["volumes"])
    assert [name for name in files if not (DEPLOY / name).is_file()] == []
    assert os.access(DEPLOY / "postgres/init.sh", os.X_OK)


def test_no_secret_is_inline(deployed: Path) -> None:
    for name, service in SERVICES.items():
        for key, value in service.get("environment", {}).items():
            assert not re.search("PASSWORD|SECRET|TOKEN|ACCESS_KEY", key), (name, key, value)
    assert "@" not in re.sub(r"\d@kafka|#.*", "", (DEPLOY / "compose.yaml").read_text())
    ignored = subprocess.run(
        ["git", "check-ignore", "-q", "deploy/secrets.env"], cwd=DEPLOY.parent, capture_output=True, check=False
    )
    # Outside of a checkout git says 128.
    assert ignored.returncode != 1


def test_each_container_gets_the_secrets_it_needs_from_its_file(deployed: Path) -> None:
    secrets, _ = read(deployed / "secrets.env")
    for name, service in SERVICES.items():
        for file in service.get("env_file", []):
            assert (deployed / file).is_file(), name
        for variable in re.findall(r"\$\$(\w+)", str(service.get("command", []))):
            assert "secrets.env" in service["env_file"], name
            assert variable in secrets
    assert {"POSTGRES_PASSWORD", "REDISCLI_AUTH", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= set(secrets)


def test_with_its_files_the_platform_has_all_settings(deployed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("GEO_ASSETS_"):
            monkeypatch.delenv(name)
    for file in SERVICES["edge"]["env_file"]:
        for name, value in read(deployed / file)[0].items():
            monkeypatch.setenv(name, value)

    found = Settings()

    assert found.stack == "production"
    hosts = {name for name, port in ((found.kafka_servers or "").split(":"),) if port == "9092"}
    assert hosts <= set(SERVICES)
    for url in (found.redis_url, found.postgres_url, found.dagster_postgres_url):
        assert url is not None
        assert url.get_secret_value().rpartition("@")[2].partition(":")[0] in SERVICES


def test_dagsters_containers_have_what_dagster_yaml_reads(deployed: Path) -> None:
    for name in ("dagster-webserver", "dagster-daemon"):
        given = set(SERVICES[name]["environment"])
        for file in SERVICES[name]["env_file"]:
            given |= set(read(deployed / file)[0])

        assert of_dagster() <= given


def test_the_commands_of_the_platform_exist() -> None:
    from geo_assets.cli import app

    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for name in PLATFORM:
        program, command, *_ = SERVICES[name]["command"]
        if program == "geo-assets":
            assert command in commands
        else:
            assert program in ("dagster-webserver", "dagster-daemon")
            assert (Path(sys.executable).parent / program).exists()


def test_secrets_are_their_owners_alone_new_each_time_and_never_replaced(deployed: Path, tmp_path: Path) -> None:
    first = deployed / "secrets.env"
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    before = first.read_text()

    again = subprocess.run(
        [sys.executable, str(deployed / "make-secrets")], capture_output=True, text=True, check=False
    )
    assert again.returncode == 1
    assert len(again.stderr.splitlines()) == 1
    assert first.read_text() == before

    other = tmp_path / "other.env"
    subprocess.run([sys.executable, str(deployed / "make-secrets"), str(other)], capture_output=True, check=True)
    passwords = [{read(path)[0][name] for name in ("POSTGRES_PASSWORD", "REDIS_PASSWORD")} for path in (first, other)]
    assert len(passwords[0] | passwords[1]) == 4


def test_docker_accepts_the_file(deployed: Path) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not here")
    (deployed.parent / "workspace.yaml").touch()
    shown = subprocess.run(
        [docker, "compose", "-f", str(deployed / "compose.yaml"), "config", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (shown.returncode, shown.stderr) == (0, "")


def test_the_caches_rules_compile(tmp_path: Path) -> None:
    varnishd = shutil.which("varnishd", path=f"{os.environ['PATH']}:/usr/sbin")
    if varnishd is None:
        missing("varnishd is not installed (Debian and Ubuntu have it in the package varnish)")
    # Its backend's name is known only among the containers.
    text = (DEPLOY / "varnish/default.vcl").read_text()
    changed = text.replace('.host = "tiles"', '.host = "127.0.0.1"').replace("/etc/varnish", str(DEPLOY / "varnish"))
    assert changed.count("127.0.0.1") == 2
    (tmp_path / "default.vcl").write_text(changed)

    compiled = subprocess.run(
        [varnishd, "-j", "none", "-C", "-n", str(tmp_path / "work"), "-f", str(tmp_path / "default.vcl")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert compiled.returncode == 0, compiled.stderr
    assert f'.port = "{SERVICES["tiles"]["healthcheck"]["test"][-1].split(":")[2].split("/")[0]}"' in text


@pytest.fixture
def new_postgres(tmp_path: Path) -> Iterator[str]:
    """Administrator's URL of a server without the platform's role and database."""
    services = Services(tmp_path / "services")
    try:
        try:
            services.start("postgres")
        except MissingProgram as fault:
            missing(str(fault))
        admin = services.settings()["TEST_POSTGRES_ADMIN_URL"].rpartition("/")[0] + "/postgres"
        with psycopg.connect(admin, autocommit=True) as connection:
            connection.execute("DROP DATABASE geo_assets")
            connection.execute("DROP ROLE geo_assets")
        yield admin
    finally:
        services.remove()


def test_postgres_is_prepared_with_a_role_that_owns_its_database_and_no_more(new_postgres: str) -> None:
    where = conninfo_to_dict(new_postgres)
    # A password may contain what SQL and the shell treat as their own.
    password = "it's $HOME; \"--"

    prepared = subprocess.run(
        [str(DEPLOY / "postgres/init.sh")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ
        | {
            "PGHOST": str(where["host"]),
            "PGPORT": str(where["port"]),
            "PGPASSWORD": str(where["password"]),
            "GEO_ASSETS_DATABASE_PASSWORD": password,
        },
    )

    assert prepared.returncode == 0, prepared.stderr
    with psycopg.connect(
        host=where["host"], port=where["port"], user="geo_assets", password=password, dbname="geo_assets"
    ) as connection:
        connection.execute("CREATE SCHEMA geo_assets")
        connection.execute("CREATE TABLE geo_assets_dagster.runs (id int)")
        assert connection.execute("SELECT ST_AsText('POINT(1 2)'::geometry)").fetchone() == ("POINT(1 2)",)
        row = connection.execute(
            "SELECT rolsuper, rolcreatedb, rolcreaterole FROM pg_roles WHERE rolname = current_user"
        ).fetchone()
        assert row == (False, False, False)
