"""The production guard: keys with a time to live and leases with fencing on a Redis server, shared by every machine.

It connects when it is first asked and again whenever it must: a Redis that is away makes calls fail, never the opening.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from resources.guard.protocol import GuardUnavailable, Lease
from resources.guard.times import milliseconds

SETTING = "GEO_ASSETS_REDIS_URL"
SSL_CA = "GEO_ASSETS_REDIS_SSL_CA"

TIMEOUT_S = 0.5
"""To connect, and to be answered. Redis answers in a millisecond; callers go on without the guard, so nobody waits."""

ATTEMPTS = 2
"""Tries of a call that may be repeated. One that timed out is not tried again: it would cost the caller twice."""

PAUSE_S = 0.05
"""Most before the second try (full jitter): a proxy or a server that was just started takes the next connection."""

# A lease is one key: its token, a space, its owner; its time to live is the key's own.
# Tokens come from one counter. Where Redis lost it, or its last steps (flushed, killed between two writes to disk), the
# server's clock in microseconds is the floor: ahead of every token given before, as nobody takes a million a second.
# Written with %.0f: Lua would print such a number with 14 digits.
_ACQUIRE = """
local held = redis.call('GET', KEYS[1])
local token
if held then
    local space = string.find(held, ' ', 1, true)
    if string.sub(held, space + 1) ~= ARGV[1] then return false end
    token = string.sub(held, 1, space - 1)
else
    local now = redis.call('TIME')
    local count = tonumber(redis.call('GET', KEYS[2]) or '0') + 1
    token = string.format('%.0f', math.max(count, now[1] * 1000000 + now[2]))
    redis.call('SET', KEYS[2], token)
end
redis.call('SET', KEYS[1], token .. ' ' .. ARGV[1], 'PX', ARGV[2])
return token
"""
_HOLDS = """
local held = redis.call('GET', KEYS[1])
if not held or string.sub(held, 1, #ARGV[1] + 1) ~= ARGV[1] .. ' ' then return 0 end
"""
_RENEW = _HOLDS + "return redis.call('PEXPIRE', KEYS[1], ARGV[2])"
_RELEASE = _HOLDS + "return redis.call('DEL', KEYS[1])"

_CAUSES: tuple[tuple[type[exceptions.RedisError], str], ...] = (
    (exceptions.AuthenticationError, "it refuses the user or password"),
    (exceptions.NoPermissionError, "its user may not do this (ACL)"),
    (exceptions.BusyLoadingError, "it is loading its data"),
    (exceptions.ReadOnlyError, "it is a read-only replica; name the primary"),
    (exceptions.OutOfMemoryError, "it is out of memory under maxmemory-policy noeviction"),
    (exceptions.TimeoutError, f"it did not answer within {TIMEOUT_S} s"),
)


class RedisGuard:
    """A guard on Redis 7 or newer (`Guard`). Safe for threads; each process connects for itself.

    Every fault is a GuardUnavailable of one line that names the setting, host and port, and never a password.

    Args:
        url: `redis://` or, with TLS, `rediss://`, with user, password and number of the database as needed.
        prefix: Before every key, on a shared server.
        ssl_ca: PEM file of the authority that signed the server's certificate; None: the system's authorities.
        clock: Seconds since the epoch, for a lease's `expires_ms`; whether it expired is for Redis to say.

    Raises:
        GuardUnavailable: The URL is none, or the authority's file cannot be read. A server that is away is found out by
            the first call.
    """

    def __init__(
        self,
        url: str,
        prefix: str = "geo_assets:",
        *,
        clock: Callable[[], float] = time.time,
        ssl_ca: str | os.PathLike[str] | None = None,
    ) -> None:
        self._clock = clock
        self._keys, self._leases, self._counter = f"{prefix}key:", f"{prefix}lease:", f"{prefix}token"
        self._closed = threading.Event()
        tls: dict[str, Any] = {}
        if ssl_ca is not None:
            if not url.startswith("rediss://"):
                raise GuardUnavailable(f"{SSL_CA} is of no use without TLS: {SETTING} must begin with rediss://")
            if not os.access(ssl_ca, os.R_OK):
                raise GuardUnavailable(f"{SSL_CA}={os.fspath(ssl_ca)} is no file that can be read")
            tls["ssl_ca_certs"] = os.fspath(ssl_ca)
        try:
            self._redis = redis.Redis.from_url(
                url,
                decode_responses=True,
                # What something else wrote here, byte by byte, is no value of ours, and no reason to fail.
                encoding_errors="surrogateescape",
                protocol=2,
                socket_connect_timeout=TIMEOUT_S,
                socket_timeout=TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
                **tls,
            )
            options = self._redis.connection_pool.connection_kwargs
            self._place = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
            self._secret = options.get("password")
        except (ValueError, TypeError, exceptions.RedisError):
            # Without the cause: what it quotes of the URL may be a part of the password.
            raise GuardUnavailable(f"{SETTING} is no URL of a Redis server, such as redis://host:6379/0") from None
        self._acquire = self._redis.register_script(_ACQUIRE)
        self._renew = self._redis.register_script(_RENEW)
        self._release = self._redis.register_script(_RELEASE)

    def set_if_absent(self, key: str, value: str, ttl_s: float) -> str | None:
        """Set it and return None; when it is there and alive, leave it and return the value it has."""
        ttl_ms = milliseconds(ttl_s)
        # Not repeated: after an answer that got lost, the second try would find the first one's value.
        return self._call(lambda: self._redis.set(self._keys + key, value, px=ttl_ms, nx=True, get=True), again=False)

    def get(self, key: str) -> str | None:
        """The value of a key that is alive."""
        return self._call(lambda: self._redis.get(self._keys + key))

    def set_many_if_absent(self, values: Mapping[str, str], ttl_s: float) -> dict[str, str]:
        """`set_if_absent` of many in one round trip; those that were there and alive, with the value they have."""
        ttl_ms = milliseconds(ttl_s)
        if not values:
            return {}

        def send() -> list[str | None]:
            with self._redis.pipeline(transaction=False) as pipeline:
                for key, value in values.items():
                    pipeline.set(self._keys + key, value, px=ttl_ms, nx=True, get=True)
                return pipeline.execute()

        found = self._call(send, again=False)
        return {key: there for key, there in zip(values, found, strict=True) if there is not None}

    def get_many(self, keys: Sequence[str]) -> dict[str, str]:
        """Those of the keys that are alive, with their values, in one round trip."""
        if not keys:
            return {}
        found = self._call(lambda: self._redis.mget([self._keys + key for key in keys]))
        return {key: value for key, value in zip(keys, found, strict=True) if value is not None}

    def delete(self, key: str) -> None:
        """Forget a key."""
        self._call(lambda: self._redis.delete(self._keys + key))

    def acquire(self, name: str, owner: str, ttl_s: float) -> Lease | None:
        """Take the lease if it is free, expired or this owner's already (same token then); else None."""
        ttl_ms = milliseconds(ttl_s)
        began_ms = self._now_ms()
        token = self._call(lambda: self._acquire([self._leases + name, self._counter], [owner, ttl_ms]))
        return None if token is None else Lease(name, owner, int(token), began_ms + ttl_ms)

    def renew(self, lease: Lease, ttl_s: float) -> Lease | None:
        """Extend it if its token is still the current one and it has not expired; None when it was lost."""
        ttl_ms = milliseconds(ttl_s)
        began_ms = self._now_ms()
        held = self._call(lambda: self._renew([self._leases + lease.name], [lease.token, ttl_ms]))
        return Lease(lease.name, lease.owner, lease.token, began_ms + ttl_ms) if held else None

    def release(self, lease: Lease) -> None:
        """Free it if its token is still the current one."""
        self._call(lambda: self._release([self._leases + lease.name], [lease.token]))

    def expire(self) -> int:
        """Nothing is left to delete: Redis does it by itself."""
        return 0

    def close(self) -> None:
        """Close every connection. Calls fail with GuardUnavailable afterwards."""
        self._closed.set()
        self._redis.close()

    def _call(self, command: Callable[[], Any], *, again: bool = True) -> Any:
        """What Redis answers; a second try where the first could not reach it and may be repeated."""
        for left in range(ATTEMPTS - 1, -1, -1):
            if self._closed.is_set():
                raise GuardUnavailable(f"the guard on Redis at {self._place} ({SETTING}) is closed")
            try:
                return command()
            except (exceptions.AuthenticationError, exceptions.BusyLoadingError, exceptions.TimeoutError) as error:
                raise self._unavailable(error) from None
            except (exceptions.ConnectionError, OSError) as error:
                if not (again and left):
                    raise self._unavailable(error) from None
            except (exceptions.RedisError, ValueError) as error:
                raise self._unavailable(error) from None
            time.sleep(random.uniform(0, PAUSE_S))
        raise AssertionError("the last try returns or raises")

    def _unavailable(self, error: Exception) -> GuardUnavailable:
        cause = next((text for kind, text in _CAUSES if isinstance(error, kind)), None)
        if cause is None and "CERTIFICATE_VERIFY_FAILED" in str(error):
            cause = f"its certificate is not to be trusted ({SSL_CA}): {_verification(str(error))}"
        elif cause is None and "SSL:" in str(error):
            cause = f"it does not speak TLS as rediss:// asks for: {' '.join(str(error).split())[:100]}"
        if cause is None:
            # A fault inside a script repeats the script's name and line; its first sentence says it.
            cause = " ".join(str(error).split())[:200] or type(error).__name__
            if self._secret:
                cause = cause.replace(str(self._secret), "…")
        return GuardUnavailable(f"Redis at {self._place} ({SETTING}) cannot be used: {cause}")

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


def _verification(text: str) -> str:
    """What of a certificate failed, of OpenSSL's words about it."""
    found = re.search(r"certificate verify failed: ([^(]+)", text)
    return found[1].strip() if found else "it cannot be verified"
