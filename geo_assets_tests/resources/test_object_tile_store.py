from __future__ import annotations

import functools
import gzip
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import boto3
import pytest

from geo_assets_tests.real_services import room, settings_of
from geo_assets_tests.resources.contract_tile_store import TileStoreContract, TileStoreHarness
from geo_assets_tests.waiting import patient
from resources.tile_store import objects
from resources.tile_store.credentials import AwsCredentials
from resources.tile_store.objects import ObjectTileStore
from resources.tile_store.protocol import InvalidName, TileStore, TileStoreError, TileStoreUnavailable


@pytest.fixture(scope="session")
def s3() -> dict[str, str]:
    return settings_of("s3")


@pytest.fixture(autouse=True)
def _credentials(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a pod has them: in the environment, from where boto3's chain takes them."""
    for name, value in s3.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)


def a_place(s3: dict[str, str]) -> str:
    return f"{s3['GEO_ASSETS_TILE_STORE_URL']}/{room()}"


def opened(s3: dict[str, str], url: str | None = None, **options: str) -> ObjectTileStore:
    return ObjectTileStore(url or a_place(s3), endpoint=s3["GEO_ASSETS_S3_ENDPOINT"], region="us-east-1", **options)


@pytest.fixture
def store(s3: dict[str, str]) -> Iterator[ObjectTileStore]:
    store = opened(s3)
    yield store
    store.delete([o.name for o in store.list()])
    store.close()


class TestObjectTileStore(TileStoreContract):
    @pytest.fixture
    def harness(self, s3: dict[str, str]) -> TileStoreHarness:
        return TileStoreHarness(
            open=functools.partial(ObjectTileStore, a_place(s3), endpoint=s3["GEO_ASSETS_S3_ENDPOINT"])
        )

    def fresh(self, tmp_path_factory: pytest.TempPathFactory) -> TileStore:
        return opened(settings_of("s3"))


def client_of(s3: dict[str, str]) -> Any:
    """A client that somebody else wrote."""
    return boto3.client("s3", endpoint_url=s3["GEO_ASSETS_S3_ENDPOINT"], region_name="us-east-1")


def said_by(error: pytest.ExceptionInfo[Exception], *hidden: str) -> str:
    message = str(error.value)
    assert "\n" not in message
    assert not [secret for secret in hidden if secret in message]
    return message


TILE = "tiles/14/9326/4742/1-0123456789abcdef.mvt.gz"
GZIP = gzip.compress(b"a tile" * 100, mtime=0)


# -- what an object says of itself -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "kind", "encoding", "cache"),
    [
        (TILE, "application/vnd.mapbox-vector-tile", "gzip", "public, max-age=31536000, immutable"),
        ("tilesets/a/1/tiles.json", "application/json", None, "public, max-age=31536000, immutable"),
        ("tilesets/a/1/tiles.pmtiles", "application/vnd.pmtiles", None, "public, max-age=31536000, immutable"),
        ("inbox/" + "0" * 64, "application/octet-stream", None, "private, no-store"),
    ],
)
def test_an_object_says_its_type_its_encoding_and_how_long_it_may_be_kept(
    store: ObjectTileStore, s3: dict[str, str], name: str, kind: str, encoding: str | None, cache: str
) -> None:
    store.put(name, GZIP)
    bucket, key = store.bucket, f"{store.prefix}/{name}"
    head = client_of(s3).head_object(Bucket=bucket, Key=key)
    assert (head["ContentType"], head.get("ContentEncoding"), head["CacheControl"]) == (kind, encoding, cache)


def test_metadata_is_kept_with_the_object(store: ObjectTileStore, s3: dict[str, str]) -> None:
    made = {"work-key": "0123456789abcdef", "content-hash": "ab" * 32, "image-digest": "sha256:" + "cd" * 32}
    store.put(TILE, GZIP, metadata=made)
    found = store.metadata(TILE)
    assert found is not None
    assert made.items() <= found.items()
    assert client_of(s3).head_object(Bucket=store.bucket, Key=f"{store.prefix}/{TILE}")["Metadata"] == made
    assert store.metadata("tiles/nothing") is None


@pytest.mark.parametrize("made", [{"Work-Key": "a"}, {"a b": "c"}, {"a": "line\nline"}, {"a": "é"}, {"": "a"}])
def test_metadata_that_no_header_can_carry_is_refused_before_it_is_sent(
    store: ObjectTileStore, made: dict[str, str]
) -> None:
    with pytest.raises(TileStoreError, match="metadata"):
        store.put(TILE, GZIP, metadata=made)
    assert not store.exists(TILE)


def test_gzip_bytes_come_back_as_they_are_stored(store: ObjectTileStore) -> None:
    store.put(TILE, GZIP)
    assert store.get(TILE) == GZIP


def test_a_built_tile_carries_its_work_key_and_image(s3: dict[str, str], tmp_path: Path) -> None:
    from geo_assets.ports import tile_object
    from geo_assets_tests.world import World, feature

    world = World(tmp_path / "home", image_digest="sha256:" + "ef" * 32)
    store = world.stack.__dict__["tiles"] = opened(s3)
    try:
        world.edit(feature(1, 1))
        world.build_dirty()
        states = [world.state(key) for key in world.published()]
        assert states
        for state in states:
            assert state.object_name is not None
            found = store.metadata(tile_object(state.object_name))
            assert found is not None
            assert found["work-key"] == state.work_key
            assert found["content-hash"] == state.content_hash
            assert found["image-digest"] == "sha256:" + "ef" * 32
    finally:
        world.close()


# -- size and number -------------------------------------------------------------------------------------------------
def test_a_large_body_goes_up_in_parts_and_comes_back_whole(store: ObjectTileStore) -> None:
    body = os.urandom(1_000_000) * 21
    store.put("inbox/large", body)
    assert store.get("inbox/large") == body
    found = store.metadata("inbox/large")
    assert found is not None
    assert found["Cache-Control"] == "private, no-store"


def test_thousands_are_listed_in_order_and_deleted_and_counted(store: ObjectTileStore) -> None:
    names = [f"tiles/10/{n // 50}/{n % 50}/1-ab" for n in range(2_300)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: store.put(name, b"x"), names))
    assert [o.name for o in store.list("tiles/")] == sorted(names)
    assert [o.name for o in store.list("tiles/10/4")] == sorted(n for n in names if n.startswith("tiles/10/4"))
    assert store.delete([*names, "tiles/10/nothing", names[0]]) == 2_300
    assert list(store.list()) == []


def test_a_deletion_of_many_counts_what_was_there_near_and_far(store: ObjectTileStore) -> None:
    near = [f"tiles/10/1/{n}/1-ab" for n in range(120)]
    others = [f"tiles/11/{n}/1/1-ab" for n in range(400)]
    far = [f"tilesets/{n}/x" for n in range(30)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: store.put(name, b"x"), [*near, *others, *far]))
    nothing = [f"tiles/1{n % 3}/{n}/7/9-cd" for n in range(60)]
    assert store.delete([*far, *nothing, *near]) == 150
    assert [o.name for o in store.list()] == sorted(others)
    assert store.delete([*near, *nothing]) == 0
    assert store.delete(others) == 400


@pytest.mark.parametrize("last", ["0", " ", "-", "/0", "/ ", "\ue000", "a", "/a/0"])
def test_a_deletion_of_many_finds_the_first_whatever_its_name_ends_with(store: ObjectTileStore, last: str) -> None:
    names = [f"x/{n:02}{last}" for n in range(objects.LISTED_FROM)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: store.put(name, b"x"), names))
    assert [o.name for o in store.list(names[0])] == [names[0]]
    assert store.delete(names) == len(names)


def test_many_threads_share_a_store(store: ObjectTileStore) -> None:
    def work(n: int) -> bool:
        name, data = f"t/{n}", str(n).encode() * 100
        store.put(name, data)
        return store.get(name) == data and store.delete([name]) == 1

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(300)))
    assert list(store.list()) == []


def test_a_name_that_is_too_long_below_the_prefix_is_refused(store: ObjectTileStore) -> None:
    name = "/".join(["x" * 203] * 5)
    with pytest.raises(InvalidName, match="below"):
        store.put(name, b"x")


def test_stores_of_one_bucket_do_not_see_each_other(s3: dict[str, str], store: ObjectTileStore) -> None:
    place = a_place(s3)
    # One prefix begins as the other does.
    near, far = opened(s3, place), opened(s3, place + "0")
    near.put("a", b"near")
    far.put("a", b"far")
    assert [o.name for o in near.list()] == ["a"]
    assert near.get("a") == b"near"
    assert near.delete(["a"]) == 1
    assert far.get("a") == b"far"


def test_rule_13_garbage_goes_through_a_bucket_a_page_at_a_time_and_takes_what_is_superseded(
    s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from geo_assets.ports import tile_object
    from geo_assets.services import garbage
    from geo_assets.tiles.tile import Tile
    from geo_assets_tests.world import World
    from resources.ledger.protocol import Commit, object_name

    world = World(tmp_path / "home", garbage_grace_s=0)
    store = world.stack.__dict__["tiles"] = opened(s3)
    try:
        keys = [Tile(14, n // 20, n % 20).key for n in range(600)]
        names: dict[int, list[str]] = {}
        for revision in (1, 2):
            found = f"{revision:x}" * 64
            world.stack.ledger.commit(
                [Commit(key, revision - 1, 0, f"{revision:016x}", found, 1, 0, "built") for key in keys]
            )
            names[revision] = [tile_object(object_name(key, revision, found)) for key in keys]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda name: store.put(name, b"x"), names[1] + names[2]))
        pages: list[int] = []
        delete = store.delete
        monkeypatch.setattr(store, "delete", lambda page: pages.append(len(page)) or delete(page))
        monkeypatch.setattr(garbage, "PAGE", 500)

        assert garbage.collect_objects(world.stack, now_ms=2**50) == 600

        assert len(pages) == 3
        assert [o.name for o in store.list()] == sorted(names[2])
        assert delete(names[2]) == 600
    finally:
        world.close()


# -- whose credentials -----------------------------------------------------------------------------------------------
def a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))


def test_a_named_profile_goes_before_the_environment(
    s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\n".join(
        [
            "[profile tiles]",
            f"aws_access_key_id = {s3['AWS_ACCESS_KEY_ID']}",
            f"aws_secret_access_key = {s3['AWS_SECRET_ACCESS_KEY']}",
        ]
    )
    a_profile(tmp_path, monkeypatch, text)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    store = opened(s3, profile="tiles")
    store.put("a", b"x")
    assert store.get("a") == b"x"
    with pytest.raises(TileStoreUnavailable) as error:
        opened(s3).get("a")
    assert "the environment" in said_by(error, s3["AWS_SECRET_ACCESS_KEY"])


def test_the_endpoint_of_the_settings_goes_before_the_environments(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = a_place(s3)
    for variable in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    store = opened(s3, url)
    store.put("a", b"x")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3["GEO_ASSETS_S3_ENDPOINT"])
    assert ObjectTileStore(url).get("a") == b"x"
    assert store.delete(["a"]) == 1


def test_credentials_that_run_out_are_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "give.py"
    script.write_text(
        "import datetime, json, pathlib\n"
        f"count = pathlib.Path({str(tmp_path / 'count')!r})\n"
        "n = int(count.read_text()) + 1 if count.exists() else 1\n"
        "count.write_text(str(n))\n"
        "end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=9)\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': f'key{n}', 'SecretAccessKey': 'secret', 'SessionToken': 't',"
        " 'Expiration': end.isoformat()}))\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    a_profile(tmp_path, monkeypatch, f"[profile tiles]\ncredential_process = {sys.executable} {script}\n")
    credentials = AwsCredentials("tiles")
    first, second = credentials(), credentials()
    assert (first["token"], first["access_key_id"] < second["access_key_id"]) == ("t", True)
    assert first["expires_at"] is not None
    assert first["expires_at"] < datetime.now(UTC) + timedelta(minutes=7)
    assert credentials.source == "the profile's credential_process, profile tiles"


def test_without_any_credentials_the_message_says_where_they_were_looked_for(
    s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    a_profile(tmp_path, monkeypatch, "")
    for call in every_call(opened(s3)):
        with pytest.raises(TileStoreUnavailable, match="no AWS credentials") as error:
            call()
        said_by(error)


def test_a_profile_that_is_not_there_is_named(
    s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_profile(tmp_path, monkeypatch, "")
    with pytest.raises(TileStoreUnavailable, match=r"nobody.*GEO_ASSETS_S3_PROFILE") as error:
        opened(s3, profile="nobody").get("a")
    said_by(error)


# -- what can be wrong -----------------------------------------------------------------------------------------------
def every_call(store: ObjectTileStore) -> list[Callable[[], object]]:
    return [
        lambda: store.put("a", b"x"),
        lambda: store.get("a"),
        lambda: store.exists("a"),
        lambda: store.delete(["a"]),
        lambda: store.delete(["a", "b"]),
        lambda: list(store.list()),
    ]


@pytest.mark.parametrize(
    ("variable", "code"),
    [("AWS_ACCESS_KEY_ID", "InvalidAccessKeyId"), ("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch")],
)
def test_a_wrong_key_is_one_line_that_says_where_it_came_from(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch, variable: str, code: str
) -> None:
    monkeypatch.setenv(variable, "averywrongkey")
    for call in every_call(opened(s3)):
        with pytest.raises(TileStoreUnavailable, match=f"GEO_ASSETS_TILE_STORE_URL.*environment.*{code}") as error:
            call()
        said_by(error, "averywrongkey", s3["AWS_SECRET_ACCESS_KEY"])


def test_a_bucket_that_is_not_there_is_named_and_never_an_empty_store(s3: dict[str, str]) -> None:
    store = opened(s3, "s3://no-such-bucket-here/tiles")
    for call in every_call(store)[1:]:
        with pytest.raises(TileStoreUnavailable, match=r"no bucket 'no-such-bucket-here'") as error:
            call()
        said_by(error)


def test_an_endpoint_where_nobody_listens_is_named_soon(s3: dict[str, str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        store = ObjectTileStore(a_place(s3), endpoint=endpoint, region="us-east-1")
        started = time.monotonic()
        with pytest.raises(TileStoreUnavailable, match=r"Connection refused.*GEO_ASSETS_S3_ENDPOINT") as error:
            store.put("a", b"x")
        assert endpoint in said_by(error)
        assert time.monotonic() - started < patient(objects.RETRY_S + objects.CONNECT_S)


def test_an_endpoint_that_has_no_address_is_named(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "RETRIES", 1)
    store = ObjectTileStore(a_place(s3), endpoint="http://nowhere.invalid:1", region="us-east-1")
    with pytest.raises(TileStoreUnavailable, match=r"nowhere\.invalid.*GEO_ASSETS_S3_ENDPOINT") as error:
        store.get("a")
    said_by(error)


def test_an_endpoint_that_never_answers_is_given_up(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "REQUEST_S", 1)
    monkeypatch.setattr(objects, "RETRY_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = ObjectTileStore(a_place(s3), f"http://127.0.0.1:{silent.getsockname()[1]}", region="us-east-1")
        started = time.monotonic()
        with pytest.raises(TileStoreUnavailable, match=r"timed out.*GEO_ASSETS_S3_ENDPOINT") as error:
            store.get("a")
        said_by(error)
        assert time.monotonic() - started < patient(10)


class _OtherRegion(BaseHTTPRequestHandler):
    """AWS' answer to who asks for a bucket in another region than its own."""

    def do_GET(self) -> None:
        body = (
            b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AuthorizationHeaderMalformed</Code><Message>The '
            b"authorization header is malformed; the region 'us-east-1' is wrong; expecting 'eu-north-1'</Message>"
            b"<Region>eu-north-1</Region></Error>"
        )
        self.send_response(400)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def other_region() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _OtherRegion) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_bucket_in_another_region_is_told_with_the_setting(s3: dict[str, str], other_region: str) -> None:
    with pytest.raises(TileStoreUnavailable, match=r"expecting 'eu-north-1'.*GEO_ASSETS_S3_REGION") as error:
        ObjectTileStore(a_place(s3), endpoint=other_region, region="us-east-1").get("a")
    said_by(error)


@pytest.mark.parametrize(
    "url", ["", "tiles", "http://bucket/x", "s3:///x", "s3://key:secret@bucket/x", "s3://b/a/../c"]
)
def test_a_url_of_another_form_is_refused_without_the_secret_in_it(url: str) -> None:
    with pytest.raises(TileStoreError, match="GEO_ASSETS_TILE_STORE_URL") as error:
        ObjectTileStore(url)
    said_by(error, "secret")


def test_a_store_is_opened_without_asking_anybody() -> None:
    code = (
        "import sys\n"
        "from resources.tile_store.objects import ObjectTileStore\n"
        "ObjectTileStore('s3://bucket/prefix', endpoint='http://127.0.0.1:1')\n"
        "ObjectTileStore('gs://bucket/prefix')\n"
        "assert not {'boto3', 'numpy', 'shapely', 'pyarrow', 'dagster'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patient(60))


# -- a server that dies ----------------------------------------------------------------------------------------------
def test_a_store_goes_on_by_itself_after_its_server_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts.local_services import Services

    services = Services(tmp_path / "services")
    services.start("s3")
    try:
        own = services.settings()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, own[name])
        store = opened(own)
        for n in range(50):
            store.put(f"before/{n}", b"x" * 2_000)
        services.kill("s3")
        with pytest.raises(TileStoreUnavailable, match="Connection refused"):
            store.get("before/1")
        back = threading.Thread(target=services.start, args=("s3",))
        back.start()
        stored = []
        deadline = time.monotonic() + patient(60)
        while len(stored) < 20 and time.monotonic() < deadline:
            try:
                store.put(f"after/{len(stored)}", b"y")
            except TileStoreUnavailable:
                continue
            else:
                stored.append(f"after/{len(stored)}")
        back.join()
        assert len(stored) == 20
        assert sorted(o.name for o in store.list("after/")) == sorted(stored)
        assert all(store.get(f"before/{n}") == b"x" * 2_000 for n in range(50))
    finally:
        services.remove()


# -- Google ------------------------------------------------------------------------------------------------------------
KEPT = ("content-type", "content-encoding", "cache-control", "x-goog-meta-")


class _Google(BaseHTTPRequestHandler):
    """Google's XML API as far as a tile store uses it. It unpacks gzip for who does not say that he takes it."""

    objects: ClassVar[dict[str, tuple[bytes, dict[str, str]]]] = {}
    protocol_version = "HTTP/1.1"

    def _name(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/bucket/")

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        kept = {k.lower(): v for k, v in self.headers.items() if k.lower().startswith(KEPT)}
        self.objects[self._name()] = body, kept
        self._answer(200, ETag='"1"')

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            prefix, after = query.get("prefix", [""])[0], query.get("start-after", [""])[0]
            names = sorted(n for n in self.objects if n.startswith(prefix) and n > after)
            entries = "".join(
                f"<Contents><Key>{escape(n)}</Key><Size>{len(self.objects[n][0])}</Size>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;1&quot;</ETag></Contents>"
                for n in names
            )
            self._answer(200, f"<ListBucketResult>{entries}</ListBucketResult>".encode())
        elif self._name() not in self.objects:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            body, kept = self.objects[self._name()]
            if kept.get("content-encoding") == "gzip" and "gzip" not in self.headers.get("accept-encoding", ""):
                body, kept = gzip.decompress(body), {k: v for k, v in kept.items() if k != "content-encoding"}
            self._answer(200, body, **{"ETag": '"1"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", **kept})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_DELETE(self) -> None:
        self._answer(204 if self.objects.pop(self._name(), None) else 404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ObjectTileStore]:
    account = {"client_email": "", "private_key": "", "private_key_id": "", "disable_oauth": True}
    (tmp_path / "account.json").write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
    _Google.objects.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Google) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield ObjectTileStore("gs://bucket/map", endpoint=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()


def test_googles_storage_gives_tiles_back_as_they_are_stored(google: ObjectTileStore) -> None:
    google.put(TILE, GZIP, metadata={"work-key": "ab"})
    _, kept = _Google.objects[f"map/{TILE}"]
    assert kept == {
        "content-type": "application/vnd.mapbox-vector-tile",
        "content-encoding": "gzip",
        "cache-control": "public, max-age=31536000, immutable",
        "x-goog-meta-work-key": "ab",
    }
    assert google.get(TILE) == GZIP
    assert google.exists(TILE)
    found = google.metadata(TILE)
    assert found is not None
    assert found["work-key"] == "ab"


def test_googles_storage_lists_and_deletes(google: ObjectTileStore) -> None:
    names = [f"tiles/1/{n}/0/1-ab" for n in range(120)]
    for name in names:
        google.put(name, b"x")
    assert [o.name for o in google.list("tiles/1/1")] == sorted(n for n in names if n.startswith("tiles/1/1"))
    assert google.delete([names[0], "tiles/nothing"]) == 1
    assert google.delete([*names, "tiles/nothing"]) == 119
    assert google.get(names[0]) is None
    assert list(google.list()) == []
