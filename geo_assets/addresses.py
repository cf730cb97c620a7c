"""What a setting that names a server must look like, and which part of it may be shown: never a user's secret.

Stricter than the clients behind it, of which each reads a `/`, `@` or `#` inside a password in its own way and then
tells parts of it as the host. No network, and no library of a client: every process starts with these.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?|\[[0-9A-Fa-f:.]+(?:%25[A-Za-z0-9_.-]+)?\]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
_PREFIX = re.compile(r"/?|(?:/[^/@:\\]+)+/?")
_QUERY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*=[^&]*(?:&[A-Za-z_][A-Za-z0-9_.-]*=[^&]*)*")
_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})|%00")
# What ends a URL's authority for one parser and not for the next.
_AMBIGUOUS = re.compile(r"[/?#@\[\]\s\\]")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of address."""

    expected: str
    """An example, for messages."""
    schemes: tuple[str, ...]
    """None: no scheme is written."""
    path: re.Pattern[str] = re.compile(r"/?")
    host: re.Pattern[str] = _HOST
    port: bool = True
    user: bool = False
    """Whether `user:password@` may stand in front of the host."""
    query: bool = False
    several_hosts: bool = False
    sockets: bool = False
    """Whether a file of this machine may stand for the host."""
    several: bool = False
    """Comma-separated addresses."""
    secret_path: bool = False
    """Whether path and query let in whoever knows them: then neither is shown."""


POSTGRES = Kind(
    "postgresql://user:password@host:5432/database",
    ("postgresql", "postgres"),
    re.compile(r"(?:/[^/@]*)?"),
    user=True,
    query=True,
    several_hosts=True,
    sockets=True,
)
REDIS = Kind(
    "redis://user:password@host:6379/0, or rediss:// with TLS",
    ("redis", "rediss", "unix"),
    re.compile(r"/?|/\d+"),
    user=True,
    query=True,
    sockets=True,
)
BUCKET = Kind("s3://bucket/prefix or gs://bucket/prefix", ("s3", "gs"), _PREFIX, _BUCKET, port=False)
ENDPOINT = Kind("http://host:port or https://host", ("http", "https"), _PREFIX)
PUBLIC = Kind("https://host or http://host:port", ("http", "https"), re.compile(r"(?:/[^@]*)?"))
CACHES = Kind("http://cache:6081, comma separated", ("http", "https"), user=True, several=True)
WEBHOOKS = Kind(
    "https://user:password@host/path?query, comma separated",
    ("http", "https"),
    re.compile(r"(?:/[^@\\]*)?"),
    user=True,
    query=True,
    several=True,
    secret_path=True,
)
BROKERS = Kind("host:port, comma separated", (), re.compile(""), several=True)

KINDS: Mapping[str, Kind] = {
    "kafka_servers": BROKERS,
    "redis_url": REDIS,
    "postgres_url": POSTGRES,
    "feature_store_url": POSTGRES,
    "ledger_url": POSTGRES,
    "dagster_postgres_url": POSTGRES,
    "tile_store_url": BUCKET,
    "s3_endpoint": ENDPOINT,
    "sts_endpoint": ENDPOINT,
    "purge_urls": CACHES,
    "alert_webhook_urls": WEBHOOKS,
    "otlp_endpoint": ENDPOINT,
    "public_tiles_url": PUBLIC,
    "public_dagster_url": PUBLIC,
    "public_edge_url": PUBLIC,
}
"""Settings by the names of their fields."""


class AddressError(ValueError):
    """No address of its kind. The message says what is expected and never what was given."""


def places(kind: Kind, text: str) -> str:
    """Hosts, ports and path of an address, for a message.

    Raises:
        AddressError: It is no address of this kind.
    """
    parts = [part.strip() for part in text.split(",")] if kind.several else [text]
    return ", ".join(_place(kind, part) for part in parts if part or not kind.several) or _refuse(kind, "is empty")


def _place(kind: Kind, text: str) -> str:
    if not text.isprintable() or " " in text:
        _refuse(kind, "has a blank or an unprintable character")
    scheme, separator, rest = text.partition("://")
    if not kind.schemes:
        scheme, rest, separator = "", text, "://"
    if not separator or (kind.schemes and scheme not in kind.schemes):
        _refuse(kind, f"does not begin with {' or '.join(f'{name}://' for name in kind.schemes)}")
    rest, _, query = rest.partition("?")
    end = rest.find("/") if "/" in rest else len(rest)
    authority, path = rest[:end], rest[end:]
    user, at, hosts = authority.rpartition("@")
    if at and not kind.user:
        _refuse(kind, "has a user or password, which does not belong there")
    if _AMBIGUOUS.search(user) or "@" in path or "@" in query or "#" in text:
        _refuse(kind, "has a /, ?, #, @ or [ that must be written as %2F, %3F, %23, %40 or %5B in a user or password")
    if _BROKEN_ESCAPE.search(text) or not _is_utf8(unquote_to_bytes(text)):
        _refuse(kind, "has a % that must be written as %25")
    if query and not (kind.query and _QUERY.fullmatch(query)):
        _refuse(kind, "has a query, which does not belong there" if not kind.query else "has a query that is none")
    if kind.sockets and not hosts:
        if scheme == "unix" and len(path) > 1:
            return path
        if scheme.startswith("postgres") and re.search(r"(?:^|&)host=(?:/|%2[Ff])[^&]+", query):
            return f"a socket of this machine{path}"
    if scheme == "unix" or not kind.path.fullmatch(path):
        _refuse(kind, "has a path that it cannot have")
    for each in hosts.split(",") if kind.several_hosts else [hosts]:
        _check_host(kind, each)
    if kind.secret_path:
        return hosts
    return f"{scheme}://{hosts}{path}" if kind is BUCKET else f"{hosts}{path.rstrip('/')}"


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _check_host(kind: Kind, text: str) -> None:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, colon, port = text, "", ""
    if not host:
        _refuse(kind, "names no host" if kind.port else "names no bucket")
    if colon and not (kind.port and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65_536):
        _refuse(kind, "has a port that is no number from 1 to 65535" if kind.port else "has a port")
    if not kind.host.fullmatch(host):
        _refuse(kind, "has a host that is none" if kind.port else "has a bucket that is none")


def _refuse(kind: Kind, fault: str) -> str:
    raise AddressError(f"{fault}; expected is {kind.expected}")


def is_loopback(host: str) -> bool:
    """Whether an address or name reaches this machine alone: 127.0.0.0/8, ::1 or localhost."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
