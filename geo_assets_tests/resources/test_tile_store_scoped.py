from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from geo_assets_tests.real_services import room, settings_of
from resources.tile_store.credentials import AwsCredentials, NoCredentials
from resources.tile_store.objects import ObjectTileStore
from resources.tile_store.protocol import InvalidName, TileStoreError, TileStoreUnavailable
from resources.tile_store.scoped import DURATION_S, ScopedCredentials, session_policy

MINE = "tiles/14/1/2/1-0123456789abcdef.mvt.gz"
THEIRS = "inbox/" + "0" * 64


@pytest.fixture(scope="session")
def s3() -> dict[str, str]:
    return settings_of("s3")


@pytest.fixture(autouse=True)
def _credentials(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)


class Place:
    """A room in the bucket, a store that may do everything in it, and ways to open narrower ones."""

    def __init__(self, s3: dict[str, str]) -> None:
        self.url = f"{s3['GEO_ASSETS_TILE_STORE_URL']}/{room()}"
        self.role = s3["GEO_ASSETS_TILE_STORE_ROLE"]
        self.endpoint = s3["GEO_ASSETS_S3_ENDPOINT"]
        self.whole = ObjectTileStore(self.url, self.endpoint)

    def scoped(self, write_prefix: str = "tiles/", url: str | None = None, role: str | None = None) -> ObjectTileStore:
        return ObjectTileStore(
            url or self.url,
            self.endpoint,
            role=role or self.role,
            sts_endpoint=self.endpoint,
            write_prefix=write_prefix,
        )


@pytest.fixture
def place(s3: dict[str, str]) -> Iterator[Place]:
    place = Place(s3)
    yield place
    place.whole.delete([o.name for o in place.whole.list()])


def test_a_job_writes_reads_and_deletes_below_its_own_prefix(place: Place) -> None:
    store = place.scoped()
    store.put(MINE, b"x", metadata={"work-key": "ab"})
    assert store.get(MINE) == b"x"
    assert [o.name for o in store.list("tiles/")] == [MINE]
    assert store.delete([MINE]) == 1
    assert store.get(MINE) is None
    assert not store.exists(MINE)


def test_a_job_puts_a_large_object_in_parts(place: Place) -> None:
    store = place.scoped()
    store.put("tiles/large", b"x" * 20_000_000)
    assert sum(o.size for o in store.list("tiles/")) == 20_000_000


@pytest.mark.parametrize("name", [THEIRS, "tilesets/other/tiles.json", "tiles-of-others/x"])
def test_a_job_cannot_put_beside_its_prefix_and_is_told_so_in_one_line(place: Place, name: str) -> None:
    with pytest.raises(TileStoreError, match=r"is not below 'tiles/'.*TileWriter") as error:
        place.scoped().put(name, b"x")
    assert not isinstance(error.value, TileStoreUnavailable)
    assert "\n" not in str(error.value)
    assert place.whole.get(name) is None


def test_a_job_cannot_replace_or_delete_what_is_not_its_own(place: Place) -> None:
    place.whole.put(THEIRS, b"theirs")
    store = place.scoped()
    assert store.get(THEIRS) == b"theirs"
    with pytest.raises(TileStoreError, match="not below 'tiles/'"):
        store.put(THEIRS, b"mine now")
    with pytest.raises(TileStoreError, match="not below 'tiles/'"):
        store.delete([THEIRS])
    store.put(MINE, b"mine")
    with pytest.raises(TileStoreError, match="not below 'tiles/'"):
        store.delete([MINE, THEIRS])
    assert place.whole.get(THEIRS) == b"theirs"


def test_a_job_neither_reads_nor_lists_nor_writes_in_another_store_of_the_bucket(
    place: Place, s3: dict[str, str]
) -> None:
    other = Place(s3)
    other.whole.put(MINE, b"x")
    credentials = ScopedCredentials(
        AwsCredentials(),
        place.role,
        place.whole.bucket,
        place.whole.prefix,
        place.whole.prefix + "/tiles/",
        place.endpoint,
    )
    intruder = ObjectTileStore(other.url, place.endpoint)
    intruder._credentials = credentials
    for call in (
        lambda: intruder.get(MINE),
        lambda: intruder.exists(MINE),
        lambda: list(intruder.list()),
        lambda: intruder.put(MINE, b"y"),
        lambda: intruder.delete([MINE]),
    ):
        with pytest.raises(TileStoreUnavailable, match="may not"):
            call()
    assert other.whole.get(MINE) == b"x"
    other.whole.delete([MINE])


def test_two_jobs_of_two_tilesets_cannot_touch_each_other(place: Place) -> None:
    one, two = place.scoped("tilesets/one/"), place.scoped("tilesets/two/")
    one.put("tilesets/one/a", b"1")
    two.put("tilesets/two/a", b"2")
    with pytest.raises(TileStoreError, match="not below 'tilesets/one/'"):
        one.put("tilesets/two/a", b"1")
    with pytest.raises(TileStoreError, match="not below 'tilesets/two/'"):
        two.delete(["tilesets/one/a"])
    assert [o.name for o in place.whole.list()] == ["tilesets/one/a", "tilesets/two/a"]


def test_a_role_that_cannot_be_assumed_is_one_line_with_the_settings(place: Place, s3: dict[str, str]) -> None:
    store = place.scoped(role="arn:aws:iam::000000000000:role/Nobody")
    with pytest.raises(TileStoreUnavailable, match=r"role/Nobody.*GEO_ASSETS_TILE_STORE_ROLE") as error:
        store.put(MINE, b"x")
    assert "\n" not in str(error.value)
    assert s3["AWS_SECRET_ACCESS_KEY"] not in str(error.value)


def test_an_sts_that_does_not_answer_is_named(place: Place) -> None:
    store = ObjectTileStore(place.url, place.endpoint, role=place.role, sts_endpoint="http://127.0.0.1:9")
    with pytest.raises(TileStoreUnavailable, match=r"http://127\.0\.0\.1:9.*GEO_ASSETS_STS_ENDPOINT"):
        store.put(MINE, b"x")


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now


def test_credentials_are_renewed_before_they_end_and_not_sooner(place: Place) -> None:
    clock = Clock()
    prefix = place.whole.prefix
    credentials = ScopedCredentials(
        AwsCredentials(), place.role, place.whole.bucket, prefix, prefix + "/", place.endpoint, clock
    )
    first = credentials()
    assert first["expires_at"] is not None
    assert timedelta(seconds=DURATION_S - 60) < first["expires_at"] - clock.now < timedelta(seconds=DURATION_S + 60)
    clock.now += timedelta(seconds=DURATION_S - 900)
    assert credentials() is first
    clock.now += timedelta(seconds=400)
    assert credentials()["token"] != first["token"]


def test_good_credentials_outlive_an_sts_that_is_away(place: Place) -> None:
    clock = Clock()
    prefix = place.whole.prefix
    credentials = ScopedCredentials(
        AwsCredentials(), place.role, place.whole.bucket, prefix, prefix + "/", place.endpoint, clock
    )
    first = credentials()
    credentials._client, credentials._endpoint = None, "http://127.0.0.1:9"
    clock.now += timedelta(seconds=DURATION_S - 300)
    assert credentials() is first
    assert credentials() is first
    clock.now += timedelta(seconds=400)
    with pytest.raises(NoCredentials, match="GEO_ASSETS_STS_ENDPOINT"):
        credentials()


def test_a_runs_stack_writes_tiles_and_nothing_else(place: Place, tmp_path: Path) -> None:
    from geo_assets.ports import inbox_object, tile_object
    from geo_assets.settings import Settings
    from geo_assets.stack import Stack

    settings = Settings(home=tmp_path, tile_store_url=place.url, s3_endpoint=place.endpoint, tile_store_role=place.role)
    tile, body = tile_object("14/1/2/1-0123456789abcdef"), inbox_object("0" * 64)
    with Stack(settings, scoped=True) as run, Stack(settings) as service:
        run.tiles.put(tile, b"x")
        with pytest.raises(TileStoreError, match="not below 'tiles/'"):
            run.tiles.put(body, b"x")
        service.tiles.put(body, b"x")
        assert run.tiles.get(tile) == b"x"


class _Amazon(BaseHTTPRequestHandler):
    """AWS as it answers who may not list the whole bucket: 403 for any object, there or not; lists below a prefix."""

    there = ""

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        entry = (
            f"<Contents><Key>{query.get('prefix', [''])[0]}{self.there.rpartition('/')[2]}</Key><Size>1</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        )
        if "list-type" in query:
            status, body = 200, f"<ListBucketResult>{entry if self.there else ''}</ListBucketResult>"
        else:
            status, body = 403, "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body.encode())

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("there", ["", MINE], ids=["no object", "an object"])
def test_a_refusal_that_only_means_that_there_is_no_object_is_none(place: Place, there: str) -> None:
    handler = type("Amazon", (_Amazon,), {"there": there})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        store = ObjectTileStore(
            place.url, f"http://127.0.0.1:{server.server_port}", role=place.role, sts_endpoint=place.endpoint
        )
        try:
            if there:
                for look in (store.get, store.exists):
                    with pytest.raises(TileStoreUnavailable, match="may not"):
                        look(MINE)
            else:
                assert store.get(MINE) is None
                assert not store.exists(MINE)
        finally:
            server.shutdown()
            thread.join()


# -- the policy --------------------------------------------------------------------------------------------------------
def test_a_policy_allows_writes_below_one_prefix_and_reads_in_the_store() -> None:
    policy = session_policy("maps", "europe", "europe/tiles/")
    allowed = {action: statement for statement in policy["Statement"] for action in statement["Action"]}
    assert {statement["Effect"] for statement in policy["Statement"]} == {"Allow"}
    assert allowed["s3:PutObject"]["Resource"] == ["arn:aws:s3:::maps/europe/tiles/*"]
    assert allowed["s3:DeleteObject"]["Resource"] == ["arn:aws:s3:::maps/europe/tiles/*"]
    assert allowed["s3:GetObject"]["Resource"] == ["arn:aws:s3:::maps/europe/*"]
    assert allowed["s3:ListBucket"]["Resource"] == ["arn:aws:s3:::maps"]
    assert allowed["s3:ListBucket"]["Condition"] == {"StringLike": {"s3:prefix": ["europe/*"]}}
    assert set(allowed) == {
        "s3:GetObject",
        "s3:PutObject",
        "s3:DeleteObject",
        "s3:AbortMultipartUpload",
        "s3:ListBucket",
    }


def test_a_store_without_a_prefix_is_the_whole_bucket() -> None:
    policy = session_policy("maps", "", "tiles/", partition="aws-cn")
    assert policy["Statement"][0]["Resource"] == ["arn:aws-cn:s3:::maps/*"]
    assert "Condition" not in policy["Statement"][2]


def test_a_prefix_means_itself_where_a_policy_has_wildcards() -> None:
    policy = session_policy("maps", "a*b", "a*b/c?$/")
    assert policy["Statement"][1]["Resource"] == ["arn:aws:s3:::maps/a${*}b/c${?}${$}/*"]


def test_a_policy_fits_the_2048_characters_of_aws() -> None:
    assert len(json.dumps(session_policy("b" * 63, "p" * 300, "p" * 300 + "/tiles/"), separators=(",", ":"))) < 2_048


def test_what_is_written_must_be_in_the_store() -> None:
    with pytest.raises(ValueError, match="not below"):
        session_policy("maps", "europe", "asia/tiles/")


def test_google_has_no_roles_to_assume_and_a_write_prefix_is_judged_like_a_name() -> None:
    with pytest.raises(TileStoreError, match="GEO_ASSETS_TILE_STORE_ROLE"):
        ObjectTileStore("gs://bucket/x", role="arn:aws:iam::1:role/x")
    with pytest.raises(InvalidName):
        ObjectTileStore("s3://bucket/x", role="arn:aws:iam::1:role/x", write_prefix="../")
