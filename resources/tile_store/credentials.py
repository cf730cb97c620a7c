"""Who a process is to an S3 endpoint: boto3's chain of credentials, which is dagster-aws' too, handed to obstore.

So one profile, one service account of Kubernetes (IRSA) or one instance role serves the tile store, Dagster's compute
logs and the AWS command line alike.
"""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import boto3.session

ASK_AGAIN = timedelta(minutes=6)
"""How long what botocore gave is used. It renews what has less than 10 minutes left, and obstore asks 5 minutes before
the end it was told: so it asks every minute, which costs a comparison, and never signs with what has run out."""

_SOURCES = {
    "env": "the environment (AWS_ACCESS_KEY_ID)",
    "shared-credentials-file": "the shared credentials file",
    "config-file": "the AWS configuration file",
    "assume-role": "a profile's role",
    "assume-role-with-web-identity": "the web identity (AWS_WEB_IDENTITY_TOKEN_FILE)",
    "container-role": "the container's role",
    "iam-role": "the instance's role",
    "sso": "AWS SSO",
    "custom-process": "the profile's credential_process",
}


class Credential(TypedDict):
    """Credentials as obstore takes them."""

    access_key_id: str
    secret_access_key: str
    token: str | None
    expires_at: datetime | None


class NoCredentials(Exception):
    """Nothing in the chain has credentials, or what has them does not give them; the message holds no secret."""


class AwsCredentials:
    """boto3's default chain: environment, profile, web identity, container, instance. Looked up when first needed.

    Args:
        profile: Of the AWS configuration files; None is `AWS_PROFILE` or the chain.
        region: Where; None is what the profile or the environment says.
    """

    def __init__(self, profile: str | None = None, region: str | None = None) -> None:
        self.profile, self._region = profile, region
        self._lock = threading.RLock()
        self._session: boto3.session.Session | None = None
        self._source: str | None = None

    def __repr__(self) -> str:
        return f"AwsCredentials(profile={self.profile!r})"

    @property
    def session(self) -> boto3.session.Session:
        """The session, made once.

        Raises:
            NoCredentials: There is no such profile, or a configuration file cannot be read.
        """
        import boto3.session
        from botocore.exceptions import BotoCoreError

        with self._lock:
            if self._session is None:
                try:
                    self._session = boto3.session.Session(profile_name=self.profile, region_name=self._region)
                except BotoCoreError as error:
                    raise NoCredentials(f"{_one_line(error)} (GEO_ASSETS_S3_PROFILE)") from None
            return self._session

    @property
    def region(self) -> str | None:
        """Region by argument, environment or profile."""
        return self.session.region_name

    @property
    def source(self) -> str:
        """Where the credentials came from, in words for a message."""
        if self._source is None:
            return "boto3's chain"
        return self._source if self.profile is None else f"{self._source}, profile {self.profile}"

    def __call__(self) -> Credential:
        """Credentials that are good for some minutes at least.

        Raises:
            NoCredentials: There are none.
        """
        from botocore.credentials import RefreshableCredentials
        from botocore.exceptions import BotoCoreError, ClientError

        with self._lock:
            try:
                found = self.session.get_credentials()
                if found is None:
                    raise NoCredentials(
                        "no AWS credentials: neither the environment, nor the profile, nor a web identity, nor a "
                        "container's or instance's role has any"
                    )
                self._source = _SOURCES.get(found.method, found.method)
                frozen = found.get_frozen_credentials()
            except (BotoCoreError, ClientError) as error:
                raise NoCredentials(f"{self.source} gives no credentials: {_one_line(error)}") from None
        if not frozen.access_key or not frozen.secret_key:
            raise NoCredentials(f"{self.source} has half a key")
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + ASK_AGAIN if isinstance(found, RefreshableCredentials) else None,
        }


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
