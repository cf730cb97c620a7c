"""Values that stand for a secret of AWS: `aws-secretsmanager:NAME#key` and `aws-ssm:/path`, read when a process starts.

A process reads each secret once and keeps it in memory: a rotated one is taken by the next start.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from resources.tile_store.credentials import AwsCredentials, NoCredentials

SECRETS_MANAGER = "aws-secretsmanager:"
PARAMETER_STORE = "aws-ssm:"

_EXPECTED = f"expected is {SECRETS_MANAGER}NAME, {SECRETS_MANAGER}NAME#key or {PARAMETER_STORE}/path"
_NAME = re.compile(r"[A-Za-z0-9/_+=.@:!-]+")


class SecretUnread(Exception):
    """A secret that cannot be read; the message names the secret and never its value."""


def is_reference(text: object) -> bool:
    """Whether a value stands for a secret elsewhere."""
    return isinstance(text, str) and text.startswith((SECRETS_MANAGER, PARAMETER_STORE))


def resolve(reference: str, region: str | None = None, profile: str | None = None) -> str:
    """The secret behind a reference, without blanks around it.

    Args:
        reference: `aws-secretsmanager:NAME` (the whole text), `aws-secretsmanager:NAME#key` (of a JSON object), both
            with a name or ARN, or `aws-ssm:/path` of a parameter, decrypted.
        region: Where it is; None is what the environment or the profile says.
        profile: Of the AWS configuration files; None is the chain.

    Raises:
        SecretUnread: It is no such reference, there is no such secret or key, or this role may not read it.
    """
    return _resolved(reference, region, profile)


@lru_cache(maxsize=64)
def _resolved(reference: str, region: str | None, profile: str | None) -> str:
    store, _, rest = reference.partition(":")
    name, has_key, key = rest.partition("#")
    if not _NAME.fullmatch(name) or bool(has_key) != bool(key) or (has_key and store == "aws-ssm"):
        # What was given instead may be the secret itself.
        raise SecretUnread(f"is no reference to a secret; {_EXPECTED}")
    shown = f"{store}:{name}" + (f"#{key}" if key else "")
    text = _read(store, name, shown, region, profile)
    if key:
        text = _member(text, key, shown)
    if not text.strip():
        raise SecretUnread(f"{shown} is empty")
    return text.strip()


def _read(store: str, name: str, shown: str, region: str | None, profile: str | None) -> str:
    try:
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise SecretUnread(f"{shown} needs boto3: install geo-assets[aws]") from None

    try:
        credentials = AwsCredentials(profile, region)
        # A start waits seconds for a secret, not minutes.
        patience = Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 4, "mode": "standard"})
        if not credentials.region:
            raise SecretUnread(f"{shown}: no region: set GEO_ASSETS_AWS_REGION")
        session: Any = credentials.session
        credentials()
        if store == "aws-ssm":
            answer = session.client("ssm", config=patience).get_parameter(Name=name, WithDecryption=True)
            return str(answer["Parameter"]["Value"])
        answer = session.client("secretsmanager", config=patience).get_secret_value(SecretId=name)
    except NoCredentials as fault:
        raise SecretUnread(f"{shown}: {fault}") from None
    except ClientError as fault:
        code = fault.response.get("Error", {}).get("Code", "an error without a code")
        raise SecretUnread(f"{shown} cannot be read: {code}{_HINTS.get(code, '')}") from None
    except BotoCoreError as fault:
        raise SecretUnread(f"{shown} cannot be read: {' '.join(str(fault).split())[:200]}") from None
    if "SecretString" not in answer:
        raise SecretUnread(f"{shown} is binary, and a text is expected")
    return str(answer["SecretString"])


_HINTS = {
    "ResourceNotFoundException": ": there is no such secret in this region and account",
    "ParameterNotFound": ": there is no such parameter in this region and account",
    "AccessDeniedException": ": this role needs secretsmanager:GetSecretValue or ssm:GetParameter on it, "
    "and kms:Decrypt where it has a key of its own",
}


def _member(text: str, key: str, shown: str) -> str:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise SecretUnread(f"{shown}: the secret is no JSON object, and has no keys")
    value = found.get(key)
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise SecretUnread(f"{shown}: the secret has no text under this key")
    return str(value)
