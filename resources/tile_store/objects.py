"""The production tile store: a bucket of S3, of anything that speaks S3 (R2, SeaweedFS, MinIO), or of Google's storage.

An object's name is its key below the store's prefix, so that a cache or a CDN can serve the bucket as it is.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import GCSStore, S3Store

from resources.tile_store.credentials import AwsCredentials, Credential, NoCredentials
from resources.tile_store.listing import LAST, in_name_order
from resources.tile_store.names import MAX_NAME_BYTES, check_name, check_prefix, check_range
from resources.tile_store.protocol import InvalidName, StoredObject, TileStoreError, TileStoreUnavailable
from resources.tile_store.scoped import ScopedCredentials

SETTING = "GEO_ASSETS_TILE_STORE_URL"

CONNECT_S = 3
REQUEST_S = 15
"""Longest one request may take; a part of a large object has 8 MB."""
RETRIES = 6
RETRY_S = 12
"""After that no further try begins: the edge's sender waits meanwhile, and repeats by itself what was answered 503."""
PART_BYTES = 8_000_000
PARTS_AT_ONCE = 4
"""A body of 100 MB goes up in parts, so that a lost connection costs one of them."""

PAGE = 1_000
"""What S3 lists and deletes with one request."""
LOOKS_AT_ONCE = 16
"""S3 does not say which of the objects of a deletion were there, so each is looked for first, so many at a time."""
LISTED_FROM = 50
"""From so many on a listing is tried first: what garbage collection deletes stands close together."""

IMMUTABLE = "public, max-age=31536000, immutable"
PRIVATE = "private, no-store"
PRIVATE_FOLDERS = ("inbox/", "shadow/")
"""What senders posted is nobody else's, were the bucket ever served; and what is built to be compared is no map."""

_TYPES = {
    ".mvt": "application/vnd.mapbox-vector-tile",
    ".pbf": "application/vnd.mapbox-vector-tile",
    ".json": "application/json",
    ".geojson": "application/geo+json",
    ".pmtiles": "application/vnd.pmtiles",
}
_GZIP = b"\x1f\x8b"
_METADATA = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_CODE = re.compile(r"<Code>([A-Za-z0-9]+)</Code>|\(code: ([A-Za-z0-9]+)\)")
_STATUS = re.compile(r"status code: (\d{3})")
_MESSAGE = re.compile(r"<Message>([^<]{1,300})</Message>")
_BAD_KEY = frozenset(
    (
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "InvalidToken",
        "TokenRefreshRequired",
        "InvalidSecurity",
        "Unauthorized",
        "AuthenticationRequired",
    )
)
_OTHER_REGION = frozenset(("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"))

T = TypeVar("T")


class Credentials(Protocol):
    """Who asks: credentials for obstore, and where they came from for a message."""

    def __call__(self) -> Credential:
        """Credentials that are good for some minutes."""
        ...

    @property
    def source(self) -> str:
        """Where they came from."""
        ...


class ObjectTileStore:
    """A tile store in a bucket (`TileStore`). Nothing is connected before the first call.

    A put is one request, or several whose last makes the object: a reader never sees a part. Objects are stored with
    Content-Type and Content-Encoding by their names and with Cache-Control, and come back as they are stored: nothing
    on the way is asked to unpack them.

    Args:
        url: `s3://bucket/prefix` or `gs://bucket/prefix`.
        endpoint: Of R2, SeaweedFS, MinIO; AWS and Google need none.
        region: Of the bucket; default: the environment's or the profile's, else us-east-1.
        profile: Of the AWS configuration files; default: boto3's chain.
        role: ARN of a role to assume, narrowed to write below `write_prefix` only.
        sts_endpoint: Where roles are assumed; default: AWS.
        write_prefix: Beginning of the names that may be put and deleted under `role`; "" is all of the store.

    Raises:
        TileStoreError: The URL is none of these, or names a role where there is no STS.
    """

    def __init__(
        self,
        url: str,
        endpoint: str | None = None,
        region: str | None = None,
        profile: str | None = None,
        role: str | None = None,
        sts_endpoint: str | None = None,
        write_prefix: str = "",
    ) -> None:
        self._scheme, self.bucket, self.prefix = _parts(url)
        check_prefix(write_prefix)
        self._write_prefix = write_prefix if role is not None else ""
        self._region = region
        self._credentials: Credentials | None = None
        if self._scheme == "gs":
            if role is not None:
                raise TileStoreError(
                    f"{SETTING} names Google's storage, which has no AssumeRole (GEO_ASSETS_TILE_STORE_ROLE): "
                    "give the run a service account of its own"
                )
            self._endpoint = endpoint or os.environ.get("GOOGLE_BASE_URL")
        else:
            self._endpoint = (
                endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
            )
            base = AwsCredentials(profile, region)
            below = f"{self.prefix}/" if self.prefix else ""
            self._credentials = (
                base
                if role is None
                else ScopedCredentials(base, role, self.bucket, self.prefix, below + write_prefix, sts_endpoint)
            )
        self.place = url if self._endpoint is None else f"{url} at {self._endpoint}"
        # Only an endpoint of one's own may list folder by folder.
        host = urlsplit(self._endpoint or "").hostname or ""
        self._by_bytes = not host or host.endswith((".r2.cloudflarestorage.com", ".amazonaws.com", ".googleapis.com"))
        self._lock = threading.Lock()
        self._stores: tuple[S3Store | GCSStore, S3Store | GCSStore] | None = None
        self._bucket_seen = False
        self._no_credentials: str | None = None
        self._pool: ThreadPoolExecutor | None = None

    def put(self, name: str, data: bytes, *, metadata: Mapping[str, str] | None = None) -> None:
        """Write atomically and durably (see `TileStore.put`).

        Metadata is kept in the object's own (`x-amz-meta-…`): names of a-z, 0-9 and `-`, printable ASCII values.
        """
        self._check(name)
        attributes = {**_attributes(name, data), **_checked(metadata or {})}
        large = len(data) > 2 * PART_BYTES
        try:
            obstore.put(
                self._writer,
                name,
                data,
                attributes=attributes,
                use_multipart=large,
                chunk_size=PART_BYTES,
                max_concurrency=PARTS_AT_ONCE,
            )
        except (BaseError, FileNotFoundError, OSError, ValueError) as error:
            raise self._fault(f"put {name!r}", error, name) from None

    def put_stream(self, name: str, pieces: Iterable[bytes], *, metadata: Mapping[str, str] | None = None) -> None:
        """Write atomically and durably, in parts as the pieces come: memory holds a few of them."""
        self._check(name)
        attributes = {**_attributes(name), **_checked(metadata or {})}
        broke: list[BaseException] = []

        def watched() -> Iterator[bytes]:
            try:
                for piece in pieces:
                    if piece:  # An empty one would end the stream.
                        yield piece
            except BaseException as error:
                broke.append(error)
                raise

        try:
            obstore.put(
                self._writer,
                name,
                watched(),
                attributes=attributes,
                use_multipart=True,
                chunk_size=PART_BYTES,
                max_concurrency=PARTS_AT_ONCE,
            )
        except Exception as error:
            if broke:
                raise broke[0] from None  # The caller's own; no part becomes an object.
            if not isinstance(error, BaseError | OSError | ValueError):
                raise
            raise self._fault(f"put {name!r}", error, name) from None

    def get(self, name: str) -> bytes | None:
        """The bytes as they are stored, or None when there is no such object."""
        self._check(name)
        return self._found(name, "get", lambda: obstore.get(self._reader, name).bytes().to_bytes())

    def get_range(self, name: str, start: int, length: int) -> bytes | None:
        """Some of the bytes as they are stored, or None when there is no such object."""
        self._check(name)
        check_range(start, length)

        def read() -> bytes:
            try:
                return obstore.get_range(self._reader, name, start=start, length=length).to_bytes()
            except (BaseError, OSError, ValueError) as error:
                # S3 answers 416 for what begins at the end or behind it.
                if "416" in str(error) or "InvalidRange" in str(error) or "out of range" in str(error):
                    return b""
                raise

        return self._found(name, "get", read)

    def exists(self, name: str) -> bool:
        """Whether there is such an object."""
        self._check(name)
        return self._there(name)

    def metadata(self, name: str) -> dict[str, str] | None:
        """Attributes of an object (`Content-Type`, `work-key`, …), or None when there is no such object."""
        self._check(name)
        head = lambda: obstore.get(self._reader, name, options={"head": True}).attributes  # noqa: E731
        found = self._found(name, "look at", head)
        return None if found is None else {str(key): str(value) for key, value in found.items()}

    def delete(self, names: Sequence[str]) -> int:
        """Delete these, 1,000 a request; how many there were."""
        for name in names:
            self._check(name)
        count = 0
        wanted = [*dict.fromkeys(names)]
        for start in range(0, len(wanted), PAGE):
            batch = wanted[start : start + PAGE]
            there = self._present(batch)
            try:
                if there:
                    obstore.delete(self._writer, there)
            except FileNotFoundError as error:
                # Google deletes one by one, and one that somebody else has deleted meanwhile is no fault.
                if "NoSuchBucket" in str(error):
                    raise self._fault("delete objects", error) from None
                self._delete_each(there)
            except (BaseError, OSError, ValueError) as error:
                raise self._fault("delete objects", error, *there) from None
            count += len(there)
        return count

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Objects whose name begins with `prefix`, in name order, 1,000 a request."""
        check_prefix(prefix)
        return self._list(prefix)

    def close(self) -> None:
        """Release connections."""
        with self._lock:
            pool, self._pool, self._stores = self._pool, None, None
        if pool is not None:
            pool.shutdown()

    # -- how -----------------------------------------------------------------------------------------------------------
    def _check(self, name: str) -> None:
        check_name(name)
        if self.prefix and len(self.prefix.encode()) + 1 + len(name.encode()) > MAX_NAME_BYTES:
            raise InvalidName(f"name {name[:200]!r} is longer than {MAX_NAME_BYTES} bytes below {self.prefix!r}")

    @property
    def _writer(self) -> S3Store | GCSStore:
        return self._open()[0]

    @property
    def _reader(self) -> S3Store | GCSStore:
        return self._open()[1]

    def _open(self) -> tuple[S3Store | GCSStore, S3Store | GCSStore]:
        """The client, and one for reading objects, which says that it takes gzip: Google unpacks for who does not."""
        stores = self._stores
        if stores is None:
            with self._lock:
                if self._stores is None:
                    self._stores = self._client({}), self._client({"accept-encoding": "gzip"})
                stores = self._stores
        return stores

    def _client(self, headers: dict[str, str]) -> S3Store | GCSStore:
        options: Any = {
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "timeout": timedelta(seconds=REQUEST_S),
            "allow_http": (self._endpoint or "").startswith("http://"),
            "default_headers": headers,
        }
        retry: Any = {
            "max_retries": RETRIES,
            "retry_timeout": timedelta(seconds=RETRY_S),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=3),
                "base": 2,
            },
        }
        common: Any = {"prefix": self.prefix or None, "client_options": options, "retry_config": retry}
        if self._scheme == "gs":
            config: Any = {"base_url": self._endpoint} if self._endpoint else {}
            return GCSStore(self.bucket, config=config, **common)
        assert self._credentials is not None
        config = {"region": self._region_found()}
        if self._endpoint is not None:
            # Both names, because obstore puts AWS_ENDPOINT_URL_S3 of the environment above the first.
            config |= {"endpoint": self._endpoint, "aws_endpoint_url_s3": self._endpoint}
        return S3Store(self.bucket, config=config, credential_provider=self._ask, **common)

    def _ask(self) -> Any:
        """Credentials for obstore, which tells what it gets from Python of a failure at great length."""
        assert self._credentials is not None
        try:
            given = self._credentials()
        except NoCredentials as error:
            self._no_credentials = str(error)
            raise
        self._no_credentials = None
        return given

    def _region_found(self) -> str:
        if self._region is not None:
            return self._region
        if isinstance(self._credentials, AwsCredentials):
            try:
                return self._credentials.region or "us-east-1"
            except NoCredentials as error:
                raise TileStoreUnavailable(f"{self.place} ({SETTING}): {error}") from None
        return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"

    def _found(self, name: str, what: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise self._fault(f"{what} {name!r}", error) from None
            if "<Code>" not in str(error):
                self._see_bucket()
            return None
        except (BaseError, OSError, ValueError) as error:
            if "403" in str(error):
                if self._missing(name):
                    return None
                if "<Code>" not in str(error):
                    self._see_bucket()
            raise self._fault(f"{what} {name!r}", error) from None

    def _there(self, name: str) -> bool:
        return self._found(name, "look for", lambda: obstore.head(self._writer, name)) is not None

    def _missing(self, name: str) -> bool:
        """Whether a refusal only means that there is no such object.

        AWS answers 403 to who may not list the whole bucket, as credentials of one job may not. Listing says it.
        """
        if self._credentials is None or isinstance(self._credentials, AwsCredentials):
            return False
        try:
            return next(self._list(name), None) is None
        except TileStoreError:
            return False

    def _see_bucket(self) -> None:
        """The answer to a HEAD has no body: whether object, bucket or key is missing or wrong, listing says."""
        if not self._bucket_seen:
            for _ in self._pages("", None):
                break
            self._bucket_seen = True

    def _present(self, names: Sequence[str]) -> list[str]:
        """Those of the names that have an object."""
        left, present = sorted(names), []
        if len(left) >= LISTED_FROM:
            reached, listed = self._listed(left)
            present = [name for name in left if name in listed]
            left = [name for name in left if reached is not None and name > reached]
        if len(left) < 2:
            return present + [name for name in left if self._there(name)]
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(LOOKS_AT_ONCE, thread_name_prefix="tile-store")
            pool = self._pool
        return present + [name for name, there in zip(left, pool.map(self._there, left), strict=True) if there]

    def _listed(self, names: Sequence[str]) -> tuple[str | None, set[str]]:
        """The sorted names that a listing of twice as many finds, and how far it came (None: past the last)."""
        folder = os.path.commonprefix([names[0], names[-1]]).rpartition("/")[0]  # noqa: RUF071
        wanted, found = set(names), set[str]()
        after = _just_before(folder, names[0].removeprefix(f"{folder}/" if folder else ""))
        for seen, item in enumerate(self._in_order(folder, after), 1):
            if item.name > names[-1]:
                break
            if item.name in wanted:
                found.add(item.name)
            if seen == 2 * len(names):
                return item.name, found
        return None, found

    def _delete_each(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                obstore.delete(self._writer, name)
            except FileNotFoundError:
                continue
            except (BaseError, OSError, ValueError) as error:
                raise self._fault("delete objects", error, name) from None

    def _list(self, prefix: str) -> Iterator[StoredObject]:
        folder, _, begins = prefix.rpartition("/")
        for item in self._in_order(folder, _just_before(folder, begins)):
            if item.name.startswith(prefix):
                yield item
            elif item.name > prefix:
                return

    def _in_order(self, folder: str, after: str | None) -> Iterator[StoredObject]:
        if self._by_bytes:
            return (item for page in self._pages(folder, after) for item in page)
        return in_name_order(self._pages, folder, after)

    def _pages(self, folder: str, after: str | None) -> Iterator[Sequence[StoredObject]]:
        try:
            for page in obstore.list(self._writer, folder or None, offset=after, chunk_size=PAGE):
                yield [
                    StoredObject(item["path"], item["size"], int(item["last_modified"].timestamp() * 1000))
                    for item in page
                ]
        except (BaseError, OSError, ValueError) as error:
            raise self._fault("list objects", error) from None

    # -- faults --------------------------------------------------------------------------------------------------------
    def _fault(self, what: str, error: Exception, *names: str) -> TileStoreError:
        """The error of the port, in one line without a secret. `names`: what was written."""
        text = str(error)
        found = _CODE.search(text)
        code = next(filter(None, found.groups())) if found else ""
        status = _STATUS.search(text)
        number = int(status[1]) if status else 0
        message = _MESSAGE.search(text)
        said = f"{code}: {message[1]}" if message and code else code or (f"status {number}" if number else "")
        source = self._credentials.source if self._credentials is not None else "Google's default credentials"
        cannot = f"{self.place} ({SETTING}) cannot {what}"
        if "credential provider" in text and self._no_credentials is not None:
            return TileStoreUnavailable(f"{cannot}: {self._no_credentials}")
        if "token request" in text:
            return TileStoreUnavailable(
                f"{cannot}: {source} give no token ({said or _reason(text)}); look at GOOGLE_APPLICATION_CREDENTIALS"
            )
        if code in _BAD_KEY or number == 401:
            return TileStoreUnavailable(
                f"{cannot}: the credentials of {source} are not taken ({code or number}); "
                "look at AWS_ACCESS_KEY_ID and GEO_ASSETS_S3_PROFILE"
            )
        if code == "NoSuchBucket":
            return TileStoreUnavailable(f"{cannot}: there is no bucket {self.bucket!r}")
        if code in _OTHER_REGION or number == 301 or "configured region" in text:
            region = self._region or "us-east-1"
            return TileStoreUnavailable(
                f"{cannot}: the bucket is not in {region!r} ({said or 'redirected'}); look at GEO_ASSETS_S3_REGION"
            )
        if code == "AccessDenied" or number == 403:
            outside = [name for name in names if not name.startswith(self._write_prefix)]
            if outside:
                return TileStoreError(
                    f"{cannot}: {outside[0]!r} is not below {self._write_prefix!r}, where alone {source} may write"
                )
            return TileStoreUnavailable(f"{cannot}: {source} may not ({said or 'AccessDenied'})")
        if number:
            return TileStoreUnavailable(f"{cannot}: answered {number} {said}".rstrip())
        if "Http" in text or "HTTP error" in text:
            where = "GEO_ASSETS_S3_ENDPOINT" if self._endpoint else "the network"
            return TileStoreUnavailable(f"{cannot}: no answer ({_reason(text)}); look at {where}")
        return TileStoreUnavailable(f"{cannot}: {said or _reason(text)}")


def _reason(text: str) -> str:
    """The cause at the bottom of obstore's explanation."""
    if found := re.search(r'message: "([^"]+)"', text) or re.search(r'"(dns error|[^"]*imed out)"', text):
        return " ".join(found[1].split())[:300]
    if "TimedOut" in text or "Timeout" in text:
        return "timed out"
    return " ".join(text.partition("\n\nDebug source")[0].split())[:300]


def _parts(url: str) -> tuple[str, str, str]:
    split = urlsplit(url)
    bucket, prefix = split.netloc, split.path.strip("/")
    if split.scheme not in ("s3", "gs") or not bucket or "@" in bucket or split.query or split.fragment:
        shown = f"{split.scheme}://{bucket.rpartition('@')[2]}{split.path}"
        raise TileStoreError(f"{SETTING} is {shown!r}: it must be s3://bucket/prefix or gs://bucket/prefix")
    if prefix:
        try:
            check_name(prefix)
        except InvalidName as fault:
            raise TileStoreError(f"{SETTING}: the prefix of {url!r}: {fault}") from None
    return split.scheme, bucket, prefix


def _attributes(name: str, data: bytes = b"") -> dict[str, str]:
    """Content-Type, Content-Encoding and Cache-Control of an object, by its name; of a tile also by its bytes."""
    stem, gzipped = (name[:-3], True) if name.endswith(".gz") else (name, False)
    # In a folder of tiles that others serve as it is, names end as maps ask for them.
    gzipped = gzipped or (name.endswith(".mvt") and data.startswith(_GZIP))
    kind = next((kind for end, kind in _TYPES.items() if stem.endswith(end)), "application/octet-stream")
    private = name.startswith(PRIVATE_FOLDERS)
    return {
        "Content-Type": kind,
        **({"Content-Encoding": "gzip"} if gzipped else {}),
        "Cache-Control": PRIVATE if private else IMMUTABLE,
    }


def _checked(metadata: Mapping[str, str]) -> dict[str, str]:
    for key, value in metadata.items():
        if not _METADATA.fullmatch(key) or not value.isascii() or not value.isprintable():
            raise TileStoreError(f"metadata {key!r}: a name is a-z, 0-9 and -, a value printable ASCII")
    return dict(metadata)


def _just_before(folder: str, begins: str) -> str | None:
    """A name below the folder that sorts before all that begin so, and after all others that do."""
    if not begins:
        return None
    last = ord(begins[-1]) - 1
    if last == ord("/") and begins[-2:-1] in ("", "/"):
        last = ord(".")  # No part of a name is empty.
    if last < ord(" "):
        return None
    before = begins[:-1] + chr(0xD7FF if 0xD800 <= last < 0xE000 else last) + LAST
    return f"{folder}/{before}" if folder else before
