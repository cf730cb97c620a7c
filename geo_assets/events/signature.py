"""Signatures of webhooks: checking them while the body streams in, and making them. No request object, no I/O.

Three schemes: Standard Webhooks 1.0 (symmetric, `v1`), GitHub's `X-Hub-Signature-256`, and a plain `X-Signature`.
Loads without a geometry library.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets as random_secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Scheme = Literal["standard", "hub", "plain"]

PREFIX = "whsec_"
"""Standard Webhooks 1.0, "Signature scheme": what a base64 secret begins with."""

MIN_PLAIN = 16
"""Characters of a plain secret: fewer can be guessed from one signed body."""

MAX_SIGNATURES = 16
"""Signatures in one header: rotation needs two; more than a few is an attempt to make us work."""

_ID = re.compile(r"[\x21-\x2d\x2f-\x7e]{1,256}")
_TIMESTAMP = re.compile(r"[0-9]{1,12}", re.ASCII)
_HEX = re.compile(r"sha256=([0-9a-fA-F]{64})", re.ASCII)
_VERSION = re.compile(r"v[0-9]{1,3}[a-z]?", re.ASCII)


class SignatureError(ValueError):
    """A signature that is missing, malformed, too old, too new, or of another body or secret."""


class SecretError(ValueError):
    """A secret that cannot be used; the message does not repeat it."""


@dataclass(frozen=True, slots=True)
class Signed:
    """What a verified signature vouches for: the scheme, and the webhook id where the scheme signs one."""

    scheme: Scheme
    webhook_id: str | None


def secret_key(secret: str) -> bytes:
    """The HMAC key of a secret: the bytes behind `whsec_`, or the text itself as UTF-8.

    Raises:
        SecretError: No base64 behind `whsec_`, not 24 to 64 bytes of it (Standard Webhooks 1.0), or a plain secret
            shorter than 16 characters.
    """
    if not secret.startswith(PREFIX):
        if len(secret) < MIN_PLAIN:
            raise SecretError(f"a plain secret has {len(secret)} characters, the least is {MIN_PLAIN}")
        try:
            return secret.encode()
        except UnicodeEncodeError:
            raise SecretError("a plain secret is no Unicode text") from None
    text = secret[len(PREFIX) :].rstrip("=")
    try:
        key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise SecretError(f"what stands behind {PREFIX} is no base64") from None
    if not 24 <= len(key) <= 64:
        raise SecretError(f"a {PREFIX} secret holds {len(key)} bytes, not 24 to 64")
    return key


def new_secret() -> str:
    """A fresh random secret: `whsec_` and 32 bytes in base64."""
    return PREFIX + base64.b64encode(random_secrets.token_bytes(32)).decode()


class Verifier:
    """Checks one request's signature: made from its headers, fed its body, asked at the end.

    The scheme is chosen by the headers alone, the strongest first: Standard Webhooks where `webhook-signature` or
    `webhook-timestamp` is there, else `X-Hub-Signature-256`, else `X-Signature`. A stronger one that fails is never
    made good by a weaker one. The two plain schemes sign no time and no id: their bodies can be sent again by whoever
    saw one, so a `webhook-id` beside them counts for nothing.

    Args:
        headers: Header values by lower-case name.
        secrets: The source's secrets; any of them may have signed.
        now_s: Seconds since the epoch, UTC.
        tolerance_s: Seconds by which the timestamp may differ, both ways.

    Raises:
        SignatureError: A header is missing or malformed, the timestamp too far from now, or there is no secret.
        SecretError: A secret that cannot be used.
    """

    __slots__ = ("_given", "_macs", "_scheme", "_webhook_id")

    def __init__(
        self, headers: Mapping[str, str], secrets: Sequence[str], now_s: float, tolerance_s: int = 300
    ) -> None:
        self._webhook_id: str | None = None
        prefix = b""
        if "webhook-signature" in headers or "webhook-timestamp" in headers:
            self._scheme: Scheme = "standard"
            webhook_id, timestamp = _header(headers, "webhook-id"), _header(headers, "webhook-timestamp")
            if _ID.fullmatch(webhook_id) is None:
                raise SignatureError("webhook-id is not 1..256 visible ASCII characters without a full stop")
            if _TIMESTAMP.fullmatch(timestamp) is None:
                raise SignatureError("webhook-timestamp is not a whole number of seconds since the epoch")
            apart = abs(now_s - int(timestamp))
            if apart > tolerance_s:
                raise SignatureError(
                    f"webhook-timestamp {timestamp} is {apart:.0f} s from now, more than {tolerance_s} s"
                )
            self._given = _standard_signatures(_header(headers, "webhook-signature"))
            self._webhook_id = webhook_id
            prefix = f"{webhook_id}.{timestamp}.".encode()
        elif "x-hub-signature-256" in headers:
            self._scheme = "hub"
            self._given = _hex_signature(headers, "x-hub-signature-256")
        elif "x-signature" in headers:
            self._scheme = "plain"
            self._given = _hex_signature(headers, "x-signature")
        else:
            raise SignatureError("no signature: webhook-id, webhook-timestamp and webhook-signature are missing")
        if not secrets:
            raise SignatureError("the source has no secret")
        self._macs = [hmac.new(secret_key(secret), prefix, hashlib.sha256) for secret in secrets]

    def update(self, chunk: bytes) -> None:
        """Take the next bytes of the body, as they came."""
        for mac in self._macs:
            mac.update(chunk)

    def finish(self) -> Signed:
        """Judge the body as taken so far.

        Returns:
            What the signature vouches for.

        Raises:
            SignatureError: None of the signatures is one of this body by one of the secrets.
        """
        match = False
        for mac in self._macs:
            made = mac.digest()
            for given in self._given:
                # No early end: the time taken says nothing about which secret or signature was right.
                match |= hmac.compare_digest(made, given)
        if not match:
            raise SignatureError("no signature matches the body")
        return Signed(self._scheme, self._webhook_id)


def _header(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name)
    if not value:
        raise SignatureError(f"{name} is missing")
    return value


def _standard_signatures(value: str) -> list[bytes]:
    """The `v1` digests of a webhook-signature header; entries of other versions are passed over."""
    entries = value.split(" ")
    if len(entries) > MAX_SIGNATURES:
        raise SignatureError(f"webhook-signature has {len(entries)} entries, more than {MAX_SIGNATURES}")
    digests: list[bytes] = []
    for entry in entries:
        version, comma, text = entry.partition(",")
        if not comma or _VERSION.fullmatch(version) is None or not text or not text.isascii():
            raise SignatureError("webhook-signature is not `v1,<base64>`, several separated by one space")
        if version != "v1":
            continue
        try:
            digest = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise SignatureError("webhook-signature holds a v1 entry that is no base64") from None
        if len(digest) != 32:
            raise SignatureError(f"webhook-signature holds a v1 entry of {len(digest)} bytes, not 32")
        digests.append(digest)
    if not digests:
        raise SignatureError("webhook-signature holds no v1 entry")
    return digests


def _hex_signature(headers: Mapping[str, str], name: str) -> list[bytes]:
    match = _HEX.fullmatch(headers[name])
    if match is None:
        raise SignatureError(f"{name} is not sha256= and 64 hexadecimal digits")
    return [bytes.fromhex(match[1])]


def sign(secret: str, webhook_id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """The three Standard Webhooks headers of a body.

    Args:
        secret: `whsec_` and base64, or plain text.
        webhook_id: Unique to the message and the same on every try; no full stop.
        timestamp_s: Seconds since the epoch, UTC, of this try.
        body: The exact bytes to be sent.

    Returns:
        Values by lower-case header name.

    Raises:
        SecretError: The secret cannot be used.
        SignatureError: The id or the timestamp could not be verified by anybody.
    """
    if _ID.fullmatch(webhook_id) is None:
        raise SignatureError("webhook-id is not 1..256 visible ASCII characters without a full stop")
    if timestamp_s < 0 or _TIMESTAMP.fullmatch(str(timestamp_s)) is None:
        raise SignatureError(f"timestamp {timestamp_s} is not a whole number of seconds since the epoch")
    mac = hmac.new(secret_key(secret), f"{webhook_id}.{timestamp_s}.".encode(), hashlib.sha256)
    mac.update(body)
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": "v1," + base64.b64encode(mac.digest()).decode(),
    }


def sign_plain(secret: str, body: bytes) -> str:
    """The value of `X-Hub-Signature-256` or `X-Signature` for a body: `sha256=` and hex."""
    return "sha256=" + hmac.new(secret_key(secret), body, hashlib.sha256).hexdigest()
