"""Tokens to log in to MSK and RDS with, signed by this process's AWS credentials. Signing asks no server."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from resources.tile_store.credentials import AwsCredentials, NoCredentials

REGION = "GEO_ASSETS_AWS_REGION"

Token = tuple[str, float]
"""A token and when it ends, in seconds since the epoch."""


class TokenError(Exception):
    """AWS credentials give no token; the message holds none and says what to look at."""


@lru_cache(maxsize=4)
def _credentials(profile: str | None, region: str | None) -> AwsCredentials:
    return AwsCredentials(profile, region)


def region_of(credentials: AwsCredentials) -> str:
    """The region by setting, environment or profile.

    Raises:
        TokenError: None of them names one.
    """
    try:
        found = credentials.region
    except NoCredentials as fault:
        raise TokenError(str(fault)) from None
    if not found:
        raise TokenError(f"no region: set {REGION}")
    return found


def msk_tokens(region: str | None = None, profile: str | None = None) -> Callable[[], Token]:
    """What makes tokens for MSK's IAM access control (SASL/OAUTHBEARER), good for a quarter of an hour each.

    Args:
        region: The cluster's; None is what the environment or the profile says.
        profile: Of the AWS configuration files; None is the chain.

    Raises:
        TokenError: The signer's package is not installed.
    """
    try:
        from aws_msk_iam_sasl_signer import MSKAuthTokenProvider
    except ImportError:
        raise TokenError("the package aws-msk-iam-sasl-signer-python is missing: install geo-assets[aws]") from None
    from botocore.credentials import CredentialProvider, Credentials
    from botocore.exceptions import BotoCoreError, ClientError

    class Chain(CredentialProvider):
        """The credentials as they are now, in the form that the signer asks for."""

        def load(self) -> Credentials:  # pyright: ignore[reportIncompatibleMethodOverride]
            now = _credentials(profile, region)()
            return Credentials(now["access_key_id"], now["secret_access_key"], now["token"])

    chain = Chain()

    def token() -> Token:
        try:
            where = region_of(_credentials(profile, region))
            made, ends_ms = MSKAuthTokenProvider.generate_auth_token_from_credentials_provider(where, chain)
        except (NoCredentials, BotoCoreError, ClientError) as fault:
            raise TokenError(" ".join(str(fault).split())) from None
        return made, ends_ms / 1_000

    return token


@lru_cache(maxsize=4)
def _rds(profile: str | None, region: str) -> Any:
    return _credentials(profile, region).session.client("rds", region_name=region)


def rds_token(host: str, port: int, user: str, region: str | None = None, profile: str | None = None) -> str:
    """A password for one new connection to RDS or Aurora: good for a quarter of an hour, and the session outlives it.

    Args:
        host: The instance's own name: the token is for this name alone, not for an alias of it.
        port: Its port.
        user: A role that was granted `rds_iam`.
        region: The server's; None is what the environment or the profile says.
        profile: Of the AWS configuration files; None is the chain.

    Raises:
        TokenError: There are no credentials, or no region.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        where = region_of(_credentials(profile, region))
        # Asked for first: the signer's own word for missing credentials names nothing to look at.
        _credentials(profile, region)()
        return str(_rds(profile, where).generate_db_auth_token(DBHostname=host, Port=port, DBUsername=user))
    except (NoCredentials, BotoCoreError, ClientError) as fault:
        raise TokenError(" ".join(str(fault).split())) from None
