"""`scripts/services`: what it starts really answers, keeps its data through kill -9, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import boto3
import botocore.exceptions
import confluent_kafka
import httpx
import psycopg
import pytest
import redis
from confluent_kafka.admin import AdminClient, NewTopic

from geo_assets_tests.needs import missing
from geo_assets_tests.waiting import patient
from scripts.local_services import STANDARD, MissingProgram, NotReady, PortTaken, Services, UnknownService
from scripts.local_services.processes import Process, family, lives, taken

COMMAND = Path(__file__).parents[2] / "scripts" / "services"


@contextmanager
def started(folder: Path, *names: str, backend: str | None = None) -> Iterator[Services]:
    services = Services(folder)
    try:
        try:
            services.start(*names, backend=backend)
        except MissingProgram as fault:
            missing(str(fault))
        yield services
    finally:
        services.remove()


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """One of each, which the tests leave running."""
    with started(tmp_path_factory.mktemp("services"), *STANDARD) as found:
        yield found


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(COMMAND), "--folder", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


# -- what is written and read back across a kill ----------------------------------------------------------------------


def s3_client(settings: dict[str, str], **credentials: str) -> Any:
    own = {
        "aws_access_key_id": settings["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": settings["AWS_SECRET_ACCESS_KEY"],
    }
    return boto3.client(
        "s3",
        endpoint_url=settings["GEO_ASSETS_S3_ENDPOINT"],
        region_name=settings["GEO_ASSETS_S3_REGION"],
        **(credentials or own),
    )


def keep_in_kafka(settings: dict[str, str]) -> None:
    servers = {"bootstrap.servers": settings["GEO_ASSETS_KAFKA_SERVERS"]}
    client = AdminClient(servers)
    for made in client.create_topics([NewTopic("kept", 1, 1)]).values():
        made.result(patient(30))
    delivered: list[Any] = []
    producer = confluent_kafka.Producer(servers | {"acks": "all"})
    producer.produce("kept", b"kept", on_delivery=lambda error, _: delivered.append(error))
    producer.flush(patient(30))
    assert delivered == [None]


def kept_in_kafka(settings: dict[str, str]) -> bytes | None:
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": settings["GEO_ASSETS_KAFKA_SERVERS"], "group.id": "none", "enable.auto.commit": False}
    )
    try:
        consumer.assign([confluent_kafka.TopicPartition("kept", 0, 0)])
        found = consumer.poll(20)
        return None if found is None else found.value()
    finally:
        consumer.close()


def keep_in_redis(settings: dict[str, str]) -> None:
    redis.Redis.from_url(settings["GEO_ASSETS_REDIS_URL"]).set("kept", b"kept")


def kept_in_redis(settings: dict[str, str]) -> Any:
    return redis.Redis.from_url(settings["GEO_ASSETS_REDIS_URL"]).get("kept")


def keep_in_postgres(settings: dict[str, str]) -> None:
    with psycopg.connect(settings["GEO_ASSETS_POSTGRES_URL"]) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 'kept'::bytea AS value, 'POINT(1 2)'::geometry AS shape")


def kept_in_postgres(settings: dict[str, str]) -> Any:
    with psycopg.connect(settings["GEO_ASSETS_POSTGRES_URL"]) as connection:
        row = connection.execute("SELECT value FROM kept WHERE ST_X(shape) = 1").fetchone()
    return row and row[0]


def keep_in_s3(settings: dict[str, str]) -> None:
    s3_client(settings).put_object(Bucket="geo-assets", Key="kept", Body=b"kept")


def kept_in_s3(settings: dict[str, str]) -> bytes:
    return s3_client(settings).get_object(Bucket="geo-assets", Key="kept")["Body"].read()


KEPT: dict[str, tuple[Callable[[dict[str, str]], None], Callable[[dict[str, str]], Any]]] = {
    "kafka": (keep_in_kafka, kept_in_kafka),
    "redis": (keep_in_redis, kept_in_redis),
    "postgres": (keep_in_postgres, kept_in_postgres),
    "s3": (keep_in_s3, kept_in_s3),
}


# -- the standard services --------------------------------------------------------------------------------------------


def test_all_services_survive_kill_9_with_their_data_and_their_ports(services: Services) -> None:
    # All four at once, as a machine fails; and the slowest alone decides how long it takes.
    before = services.settings()
    for keep, _ in KEPT.values():
        keep(before)

    services.kill(*STANDARD)
    assert [each.state for each in services.status(*STANDARD)] == ["killed"] * 4
    assert services.settings() == before
    services.start()

    assert services.settings() == before
    for _, kept in KEPT.values():
        assert kept(before) == b"kept"


def test_starting_what_runs_changes_nothing(services: Services) -> None:
    before = services.status(*STANDARD)

    services.start()

    assert [each.pid for each in services.status(*STANDARD)] == [each.pid for each in before]
    assert [each.state for each in before] == ["running"] * 4


def test_the_settings_file_names_all_services_and_only_its_owner_reads_it(services: Services) -> None:
    assert stat.S_IMODE(services.settings_file.stat().st_mode) == 0o600
    lines = services.settings_file.read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines if not line.startswith("#"))

    assert found == services.settings()
    assert {
        *("GEO_ASSETS_KAFKA_SERVERS", "GEO_ASSETS_REDIS_URL", "GEO_ASSETS_POSTGRES_URL", "GEO_ASSETS_TILE_STORE_URL"),
        *("GEO_ASSETS_S3_ENDPOINT", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "TEST_KAFKA_SASL_SERVERS"),
    } <= set(found)


def test_every_file_with_a_password_is_its_owners_alone(services: Services) -> None:
    settings = services.settings()
    passwords = [settings["TEST_KAFKA_SASL_PASSWORD"], settings["AWS_SECRET_ACCESS_KEY"]]
    passwords += [psycopg.conninfo.conninfo_to_dict(settings["GEO_ASSETS_POSTGRES_URL"])["password"]]
    files = [path for path in services.folder.glob("*") if path.is_file()]
    files += [path for path in services.folder.glob("*/*") if path.is_file()]

    for path in files:
        if any(password in path.read_text(errors="replace") for password in passwords):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_nothing_listens_beyond_loopback(services: Services) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # No packet is sent: this only asks which address the machine would use.
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        own = probe.getsockname()[0]

    for each in services.status(*STANDARD):
        state = json.loads((services.folder / each.name / "state.json").read_text())
        for port in state["ports"].values():
            with socket.socket() as caller:
                caller.settimeout(2)
                assert caller.connect_ex((own, port)) != 0, (each.name, port)


def test_redis_asks_for_its_password(services: Services) -> None:
    url = services.settings()["GEO_ASSETS_REDIS_URL"]
    assert redis.Redis.from_url(url).ping()

    with pytest.raises(redis.AuthenticationError):
        redis.Redis.from_url(f"redis://{url.partition('@')[2]}").ping()


def test_the_platform_owns_its_database_and_is_no_superuser(services: Services) -> None:
    settings = services.settings()
    with psycopg.connect(settings["GEO_ASSETS_POSTGRES_URL"]) as connection:
        connection.execute("CREATE SCHEMA own")
        assert connection.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").fetchone() == (False,)
        assert connection.execute("SHOW fsync").fetchone() == ("on",)
        assert connection.execute("SHOW max_connections").fetchone() == ("200",)
        connection.rollback()
    with psycopg.connect(settings["TEST_POSTGRES_ADMIN_URL"]) as connection:
        assert connection.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").fetchone() == (True,)

    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(settings["GEO_ASSETS_POSTGRES_URL"], password="wrong")


def test_s3_refuses_who_is_nobody_and_narrows_a_role_to_its_policy(services: Services) -> None:
    settings = services.settings()
    assert httpx.get(f"{settings['GEO_ASSETS_S3_ENDPOINT']}/geo-assets", timeout=patient(30)).status_code == 403
    role = boto3.client(
        "sts",
        endpoint_url=settings["GEO_ASSETS_S3_ENDPOINT"],
        region_name=settings["GEO_ASSETS_S3_REGION"],
        aws_access_key_id=settings["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=settings["AWS_SECRET_ACCESS_KEY"],
    ).assume_role(
        RoleArn=settings["GEO_ASSETS_TILE_STORE_ROLE"],
        RoleSessionName="run",
        Policy=json.dumps(
            {
                "Version": "2012-10-17",
                "Statement": [
                    {"Effect": "Allow", "Action": ["s3:PutObject"], "Resource": ["arn:aws:s3:::geo-assets/mine/*"]}
                ],
            }
        ),
    )["Credentials"]
    narrow = s3_client(
        settings,
        aws_access_key_id=role["AccessKeyId"],
        aws_secret_access_key=role["SecretAccessKey"],
        aws_session_token=role["SessionToken"],
    )

    narrow.put_object(Bucket="geo-assets", Key="mine/tile", Body=b"x")
    with pytest.raises(botocore.exceptions.ClientError, match="AccessDenied"):
        narrow.put_object(Bucket="geo-assets", Key="others/tile", Body=b"x")


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", "PLAIN"])
def test_kafkas_second_listener_asks_for_a_password(services: Services, mechanism: str) -> None:
    settings = services.settings()

    def topics(password: str, seconds: float) -> Any:
        client = AdminClient(
            {
                "bootstrap.servers": settings["TEST_KAFKA_SASL_SERVERS"],
                "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": mechanism,
                "sasl.username": settings["TEST_KAFKA_SASL_USERNAME"],
                "sasl.password": password,
                "log_level": 0,
            }
        )
        return client.list_topics(timeout=seconds).topics

    assert topics(settings["TEST_KAFKA_SASL_PASSWORD"], patient(30)) is not None
    with pytest.raises(confluent_kafka.KafkaException):
        topics("wrong", 4)


def test_kafka_makes_no_topic_out_of_a_typo(services: Services) -> None:
    servers = services.settings()["GEO_ASSETS_KAFKA_SERVERS"]
    client = AdminClient({"bootstrap.servers": servers, "allow.auto.create.topics": True, "log_level": 0})
    client.list_topics("tpyo", timeout=patient(30))

    assert "tpyo" not in client.list_topics(timeout=patient(30)).topics


def test_status_says_what_runs_and_fails_when_something_does_not(services: Services, tmp_path: Path) -> None:
    asked = run(services.folder, "status")
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.count("running") == 4
    assert "MB" in asked.stdout

    nothing = run(tmp_path, "status")
    assert nothing.returncode == 3
    assert nothing.stdout.count("never started") == 5


# -- one service's life -----------------------------------------------------------------------------------------------


def test_stop_leaves_no_process_and_no_setting_and_start_finds_the_data(tmp_path: Path) -> None:
    with started(tmp_path, "redis", "postgres") as services:
        keep_in_postgres(services.settings())
        keep_in_redis(services.settings())
        before = services.settings()
        members = [
            each
            for name in ("redis", "postgres")
            for each in family(Process(**json.loads((tmp_path / name / "process.json").read_text())))
        ]
        assert len(members) > 3

        services.stop()

        assert not [each for each in members if lives(each)]
        assert not services.settings_file.exists()
        assert [each.state for each in services.status("redis", "postgres")] == ["stopped"] * 2

        services.restart("redis", "postgres")
        assert services.settings() == before
        assert kept_in_postgres(before) == kept_in_redis(before) == b"kept"
        data = services.log("postgres").parent

        services.remove()
        assert not data.exists()
        assert not list(tmp_path.glob("*"))


def test_a_port_that_another_program_has_taken_meanwhile_is_said_in_one_line(tmp_path: Path) -> None:
    with started(tmp_path, "redis") as services:
        port = int(services.settings()["GEO_ASSETS_REDIS_URL"].rpartition(":")[2].partition("/")[0])
        services.stop()
        with socket.create_server(("127.0.0.1", port)):
            with pytest.raises(PortTaken, match=rf"^redis: port {port} .* taken by another program") as raised:
                services.start("redis")
            assert "\n" not in str(raised.value)
        assert not services.settings()


def test_a_missing_program_is_one_line_that_names_its_package(tmp_path: Path) -> None:
    answer = run(tmp_path, "start", "redis", PATH=str(tmp_path))

    assert answer.returncode == 1
    assert answer.stderr.splitlines() == [
        "redis-server is not installed: Debian and Ubuntu have it in the package redis-server"
    ]


def test_a_service_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with started(tmp_path, "redis") as services:
        services.stop()
        (tmp_path / "redis/data/appendonlydir/appendonly.aof.manifest").write_text("not a manifest\n")

        answer = run(tmp_path, "start", "redis")
        with pytest.raises(NotReady) as raised:
            services.start("redis")

        assert answer.returncode == 1
        assert answer.stderr.startswith("redis ended; its log is ")
        assert "AOF manifest" in answer.stderr
        assert "\n" not in str(raised.value)
        assert services.status("redis")[0].state == "stopped"


def test_a_process_that_is_not_ours_is_never_ended(tmp_path: Path) -> None:
    with started(tmp_path, "redis") as services:
        services.kill("redis")
        stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            # As after a restart of the machine: the id is in use again, by another.
            record = tmp_path / "redis/process.json"
            record.write_text(json.dumps(json.loads(record.read_text()) | {"pid": stranger.pid}))

            services.kill("redis")
            services.stop("redis")

            assert stranger.poll() is None
        finally:
            stranger.kill()
            stranger.wait()


def test_an_unknown_service_is_named_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UnknownService, match="'kafak'; there are kafka, redis, postgres, s3, cache"):
        Services(tmp_path).start("kafak")


def test_a_killed_services_port_is_not_given_to_outgoing_connections(tmp_path: Path) -> None:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except FileNotFoundError:
        pytest.skip("this system does not say which ports those are")
    with started(tmp_path, "redis") as services:
        port = int(services.settings()["GEO_ASSETS_REDIS_URL"].rpartition(":")[2].partition("/")[0])
        assert port < first
        services.kill("redis")
        assert not taken(port)


# -- the cache --------------------------------------------------------------------------------------------------------


class Origin(BaseHTTPRequestHandler):
    """Answers with how often it was asked, and the Cache-Control that the path names."""

    protocol_version = "HTTP/1.1"
    asked = 0
    control: ClassVar[dict[str, str | None]] = {
        "/kept": "public, max-age=60",
        "/stale": "max-age=1, stale-while-revalidate=600",
        "/never": "no-store",
        "/said-nothing": None,
        "/varies": "max-age=60",
        "/missing": "max-age=60",
    }

    def do_GET(self) -> None:
        type(self).asked += 1
        body = str(type(self).asked).encode()
        control = self.control[self.path.partition("?")[0]]
        self.send_response(404 if self.path == "/missing" else 200)
        if control is not None:
            self.send_header("Cache-Control", control)
        if self.path == "/varies":
            self.send_header("Vary", "Origin")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    origin = ThreadingHTTPServer(("127.0.0.1", 0), Origin)
    threading.Thread(target=origin.serve_forever, daemon=True).start()
    try:
        backend = f"127.0.0.1:{origin.server_port}"
        with started(tmp_path_factory.mktemp("cache"), "cache", backend=backend) as services:
            # Killed and started without saying the backend again: it is remembered.
            services.kill("cache")
            services.start("cache")
            with httpx.Client(base_url=services.settings()["GEO_ASSETS_PURGE_URLS"], timeout=patient(30)) as client:
                yield client
    finally:
        origin.shutdown()
        origin.server_close()


def test_the_cache_keeps_what_the_origin_allows_and_no_more(cache: httpx.Client) -> None:
    assert cache.get("/kept").text == cache.get("/kept").text
    assert cache.get("/kept").headers["X-Cache"] == "HIT"
    assert cache.get("/missing").text == cache.get("/missing").text
    assert cache.get("/never").text != cache.get("/never").text
    assert cache.get("/said-nothing").text != cache.get("/said-nothing").text


def test_the_cache_serves_nothing_stale(cache: httpx.Client) -> None:
    first = cache.get("/stale").text
    threading.Event().wait(1.2)

    assert cache.get("/stale").text != first


def test_a_purge_forgets_every_variant_of_a_path(cache: httpx.Client) -> None:
    def variants() -> list[str]:
        sites = [{}, {"Origin": "https://a.example"}, {"Origin": "https://b.example"}]
        return [cache.get("/varies", headers=site).text for site in sites]

    before = variants()
    assert len(set(before)) == 3
    assert variants() == before

    assert cache.request("PURGE", "/varies").status_code == 200
    assert not set(variants()) & set(before)


def test_a_purge_leaves_other_paths_alone(cache: httpx.Client) -> None:
    before = cache.get("/kept?v=1").text
    cache.request("PURGE", "/kept?v=2")

    assert cache.get("/kept?v=1").text == before


def test_a_cache_without_a_backend_is_refused(tmp_path: Path) -> None:
    answer = run(tmp_path, "start", "cache")

    assert answer.returncode == 1
    assert "--backend" in answer.stderr
    assert len(answer.stderr.splitlines()) == 1
