"""Values of settings that stand for something else: secrets by their name in AWS, and logins without a password.

Settings are filled in when they are made, so that every role and every command starts with plain values; Dagster's own
processes, which read one URL past the settings, fill it in by the same functions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from pydantic import SecretStr

from resources.aws import references

RDS_IAM = "aws-rds-iam"
"""In a Postgres URL in the place of a password: each new connection logs in with a token (`resources.postgres`)."""

_POSTGRES = ("postgres_url", "feature_store_url", "ledger_url", "dagster_postgres_url")


def filled_in(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the names of settings, with secrets in the place of references, and Postgres URLs with TLS and login.

    Raises:
        ValueError: A secret cannot be read, or a URL has a password where tokens are asked for. The setting is named.
    """
    values = dict(given)
    region, profile = _text(values.get("aws_region")), _text(values.get("s3_profile"))
    for name, value in given.items():
        text = _text(value)
        if references.is_reference(text):
            found = _secret(f"GEO_ASSETS_{name.upper()}", text or "", region, profile)
            values[name] = SecretStr(found) if isinstance(value, SecretStr) else found
    for name in _POSTGRES:
        value = values.get(name)
        text = _text(value)
        if text is not None:
            url = _with_login(
                f"GEO_ASSETS_{name.upper()}", text, values.get("postgres_ssl_ca"), _text(values.get("postgres_auth"))
            )
            values[name] = SecretStr(url) if isinstance(value, SecretStr) else url
    return values


def of_postgres(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """The URL of Dagster's storage as a deployment's environment has it, filled in as the settings are.

    Raises:
        ValueError: As in `filled_in`.
    """
    names = ("aws_region", "s3_profile", "postgres_ssl_ca", "postgres_auth")
    rest = {name: value for name in names if (value := environ.get(f"GEO_ASSETS_{name.upper()}", "").strip())}
    return str(filled_in({**rest, "dagster_postgres_url": text})["dagster_postgres_url"])


def secret(what: str, text: str, region: str | None, profile: str | None) -> str:
    """A text, or the secret that it stands for.

    Args:
        what: What needs it, for the message.
        text: Any text.
        region: Of AWS.
        profile: Of the AWS configuration files.

    Raises:
        ValueError: The secret cannot be read.
    """
    return _secret(what, text, region, profile) if references.is_reference(text) else text


def _secret(what: str, reference: str, region: str | None, profile: str | None) -> str:
    try:
        return references.resolve(reference, region, profile)
    except references.SecretUnread as fault:
        raise ValueError(f"{what}: {fault}") from None


def _with_login(setting: str, url: str, ca: object, auth: str | None) -> str:
    if "://" not in url:
        # No URL at all is told by the check of addresses.
        return url
    if auth == "aws-iam":
        scheme, _, rest = url.partition("://")
        authority, slash, path = rest.partition("/")
        user, at, host = authority.rpartition("@")
        name, colon, password = user.partition(":")
        if colon and password != RDS_IAM:
            raise ValueError(f"{setting} has a password, which GEO_ASSETS_POSTGRES_AUTH=aws-iam has no use for")
        if not at or not name:
            raise ValueError(f"{setting} names no user, whom GEO_ASSETS_POSTGRES_AUTH=aws-iam needs")
        url = f"{scheme}://{name}:{RDS_IAM}@{host}{slash}{path}"
    if isinstance(ca, str | Path) and "sslmode=" not in (urlsplit(url).query if "?" in url else ""):
        url += f"{'&' if '?' in url else '?'}sslmode=verify-full&sslrootcert={quote(str(ca), safe='/')}"
    return url


def _text(value: object) -> str | None:
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    return text.strip() if isinstance(text, str) else None
