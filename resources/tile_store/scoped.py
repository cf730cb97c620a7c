"""Credentials of one job: a role assumed with a session policy that lets it write below one prefix and nowhere else.

A build that goes wrong, or a worker that was broken into, then cannot touch another tileset, the inbox or anything
else in the bucket. Works where the endpoint has STS: AWS, SeaweedFS, MinIO (docs/object-store.md).
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from resources.tile_store.credentials import AwsCredentials, Credential, NoCredentials

DURATION_S = 3_600
"""AWS' limit where the role is assumed by another role, as a pod with a service account does."""
RENEW_BEFORE = timedelta(minutes=10)
"""obstore asks 5 minutes before the end it was told, and must be given new ones then."""
ASK_AGAIN_S = 5.0
"""After STS failed while the last credentials are still good."""


def session_policy(bucket: str, prefix: str, write_prefix: str, *, partition: str = "aws") -> dict[str, Any]:
    """What a job may do; the role's own policy can only take more away.

    Args:
        bucket: The bucket.
        prefix: The tile store's folder in it, "" for all of it: objects below it can be read and listed.
        write_prefix: The beginning of the names that can be put and deleted, from the bucket's root.
        partition: `aws`, `aws-cn` or `aws-us-gov`.

    Returns:
        A policy document; as JSON it is below AWS' 2,048 characters for any prefix of up to 400.

    Raises:
        ValueError: What can be written could not be read.
    """
    room = prefix.rstrip("/") + "/" if prefix.rstrip("/") else ""
    if not write_prefix.startswith(room):
        raise ValueError(f"the write prefix {write_prefix!r} is not below the tile store's prefix {prefix!r}")
    arn = f"arn:{partition}:s3:::{bucket}"
    listing: dict[str, Any] = {"Effect": "Allow", "Action": ["s3:ListBucket"], "Resource": [arn]}
    if room:
        listing["Condition"] = {"StringLike": {"s3:prefix": [f"{_literal(room)}*"]}}
    return {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Action": ["s3:GetObject"], "Resource": [f"{arn}/{_literal(room)}*"]},
            {
                "Effect": "Allow",
                # Large objects go up in parts; what is left of a put that failed is taken back.
                "Action": ["s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
                "Resource": [f"{arn}/{_literal(write_prefix)}*"],
            },
            listing,
        ],
    }


def _literal(text: str) -> str:
    """The text where a policy would read `*`, `?` and `$` as more than themselves."""
    return re.sub(r"[*?$]", lambda found: f"${{{found[0]}}}", text)


class ScopedCredentials:
    """Credentials of an assumed role under a session policy, renewed before they end.

    Args:
        base: Who assumes the role.
        role: Its ARN.
        bucket: As in `session_policy`, and so the next two.
        prefix: What can be read.
        write_prefix: What can be written.
        endpoint: Of STS; None is AWS'.
        clock: Now, for tests of renewal.
    """

    def __init__(
        self,
        base: AwsCredentials,
        role: str,
        bucket: str,
        prefix: str,
        write_prefix: str,
        endpoint: str | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._base, self._role, self._endpoint, self._clock = base, role, endpoint, clock
        partition = role.split(":")[1] if role.startswith("arn:") and role.count(":") > 1 else "aws"
        policy = session_policy(bucket, prefix, write_prefix, partition=partition)
        self._policy = json.dumps(policy, separators=(",", ":"))
        self._lock = threading.Lock()
        self._client: Any = None
        self._last: Credential | None = None
        self._next_try = 0.0

    def __repr__(self) -> str:
        return f"ScopedCredentials(role={self._role!r})"

    @property
    def source(self) -> str:
        """Where the credentials came from, in words for a message."""
        return f"the role {self._role} assumed with {self._base.source}"

    def __call__(self) -> Credential:
        """Credentials that are good for more than ten minutes; less only while STS does not answer.

        Raises:
            NoCredentials: The role cannot be assumed.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        with self._lock:
            now = self._clock()
            if self._last is not None:
                end = self._last["expires_at"]
                assert end is not None
                if end - now > RENEW_BEFORE or (end > now and time.monotonic() < self._next_try):
                    return self._last
            try:
                self._last = self._assume()
            except (BotoCoreError, ClientError) as error:
                if self._last is not None and self._last["expires_at"] > now:  # type: ignore[operator]
                    self._next_try = time.monotonic() + ASK_AGAIN_S
                    return self._last
                where = self._endpoint or "AWS STS"
                reason = " ".join(str(error).split())[:300]
                raise NoCredentials(
                    f"{where} does not let {self._base.source} assume {self._role}: {reason} "
                    "(GEO_ASSETS_TILE_STORE_ROLE, GEO_ASSETS_STS_ENDPOINT)"
                ) from None
            return self._last

    def _assume(self) -> Credential:
        from botocore.config import Config

        if self._client is None:
            self._base()  # Says what is missing where nothing in the chain has credentials.
            self._client = self._base.session.client(
                "sts",
                endpoint_url=self._endpoint,
                region_name=self._base.region or "us-east-1",
                config=Config(connect_timeout=3, read_timeout=5, retries={"total_max_attempts": 3, "mode": "standard"}),
            )
        given = self._client.assume_role(
            RoleArn=self._role,
            # In the audit trail a pod is found by its name.
            RoleSessionName=re.sub(r"[^\w+=,.@-]", "-", f"geo-assets-{socket.gethostname()}", flags=re.ASCII)[:64],
            Policy=self._policy,
            DurationSeconds=DURATION_S,
        )["Credentials"]
        return {
            "access_key_id": given["AccessKeyId"],
            "secret_access_key": given["SecretAccessKey"],
            "token": given["SessionToken"],
            # obstore takes this very time zone; botocore gives the one of dateutil.
            "expires_at": given["Expiration"].astimezone(UTC),
        }
