"""What a run prints is kept in the bucket: the block of deploy/dagster.yaml against a real S3 server."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import boto3
import pytest
import yaml
from dagster import DagsterInstance
from dagster._core.storage.compute_log_manager import ComputeIOType
from dagster_aws.s3.compute_log_manager import S3ComputeLogManager

from geo_assets_tests.real_services import room, settings_of
from geo_assets_tests.waiting import patient

DEPLOYED = Path(__file__).parents[1] / "deploy/dagster.yaml"
KEY = ["a-run", "compute_logs", "tiles"]


@pytest.fixture(autouse=True)
def terminates() -> Iterator[None]:
    """What this process starts can be terminated, whatever a library did to SIGTERM before."""
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    handler = None
    if threading.current_thread() is threading.main_thread():
        handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    if handler is not None:
        signal.signal(signal.SIGTERM, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, str]:
    """Bucket and prefix, named in the environment as a deployment names them."""
    s3 = settings_of("s3")
    bucket, prefix = s3["GEO_ASSETS_TILE_STORE_URL"].removeprefix("s3://").split("/")[0], f"{room()}/logs"
    for name, value in s3.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3["GEO_ASSETS_S3_ENDPOINT"])
    monkeypatch.setenv("AWS_DEFAULT_REGION", s3["GEO_ASSETS_S3_REGION"])
    monkeypatch.setenv("GEO_ASSETS_LOGS_BUCKET", bucket)
    monkeypatch.setenv("GEO_ASSETS_LOGS_PREFIX", prefix)
    monkeypatch.setenv("GEO_ASSETS_DAGSTER_STORAGE", str(tmp_path / "storage"))
    return bucket, prefix


def opened(home: Path) -> DagsterInstance:
    """An instance of a machine of its own, with the deployed block and no other."""
    home.mkdir()
    block = yaml.safe_load(DEPLOYED.read_text())["compute_logs"]
    (home / "dagster.yaml").write_text(yaml.safe_dump({"compute_logs": block, "telemetry": {"enabled": False}}))
    return DagsterInstance.from_config(str(home))


@pytest.fixture
def instance(place: tuple[str, str], tmp_path: Path) -> Iterator[DagsterInstance]:
    with opened(tmp_path / "home") as instance:
        yield instance
        instance.compute_log_manager.delete_logs(log_key=KEY)


def test_what_a_run_prints_is_read_back_from_the_bucket_on_another_machine(
    instance: DagsterInstance, place: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = instance.compute_log_manager
    assert isinstance(manager, S3ComputeLogManager)
    with manager.capture_logs(KEY):
        print("built 7 tiles")
        print("one was slow", file=sys.stderr)

    bucket, prefix = place
    found = boto3.client("s3").list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/storage/a-run/")["Contents"]
    assert sorted(o["Key"].rpartition("/")[2] for o in found) == ["tiles.err", "tiles.out"]

    monkeypatch.setenv("GEO_ASSETS_DAGSTER_STORAGE", str(tmp_path / "elsewhere"))
    with opened(tmp_path / "other") as other:
        data = other.compute_log_manager.get_log_data(KEY)
        assert data.stdout == b"built 7 tiles\n"
        assert data.stderr is not None
        assert b"one was slow" in data.stderr
        url = other.compute_log_manager.get_log_metadata(KEY).stdout_download_url
        assert url is not None
        with urlopen(url, timeout=patient(30)) as answer:
            assert answer.read() == b"built 7 tiles\n"


def test_a_run_that_prints_nothing_leaves_nothing_in_the_bucket(
    instance: DagsterInstance, place: tuple[str, str]
) -> None:
    manager = instance.compute_log_manager
    with manager.capture_logs(KEY):
        pass
    bucket, prefix = place
    assert "Contents" not in boto3.client("s3").list_objects_v2(Bucket=bucket, Prefix=prefix)


def test_logs_of_a_run_are_deleted_with_it(instance: DagsterInstance, place: tuple[str, str]) -> None:
    manager = instance.compute_log_manager
    assert isinstance(manager, S3ComputeLogManager)
    with manager.capture_logs(KEY):
        print("built 7 tiles")
    assert manager.cloud_storage_has_logs(KEY, ComputeIOType.STDOUT)
    manager.delete_logs(log_key=KEY)
    assert not manager.cloud_storage_has_logs(KEY, ComputeIOType.STDOUT)
