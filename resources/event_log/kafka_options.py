"""How a Kafka cluster is reached and used: plain values, no client library, so that settings can be mapped anywhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from resources.event_log.protocol import LogError

SERVERS = "GEO_ASSETS_KAFKA_SERVERS"
PROTOCOL = "GEO_ASSETS_KAFKA_SECURITY_PROTOCOL"
MECHANISM = "GEO_ASSETS_KAFKA_SASL_MECHANISM"
USERNAME = "GEO_ASSETS_KAFKA_SASL_USERNAME"
PASSWORD = "GEO_ASSETS_KAFKA_SASL_PASSWORD"
CA = "GEO_ASSETS_KAFKA_SSL_CA"
CERTIFICATE = "GEO_ASSETS_KAFKA_SSL_CERTIFICATE"
KEY = "GEO_ASSETS_KAFKA_SSL_KEY"
"""The settings that faults are traced back to: an operator knows these names, not librdkafka's."""

MSK_IAM = "AWS_MSK_IAM"
"""The mechanism by which MSK knows a role: SASL/OAUTHBEARER with a token that the role's credentials sign."""


@dataclass(frozen=True, slots=True)
class KafkaOptions:
    """A cluster, and how this process behaves towards it.

    Args:
        servers: Bootstrap servers, `host:port,host:port`.
        topic_prefix: Before every topic and group, so that several deployments share a cluster.
        security: librdkafka's settings of TLS and SASL; `security_of` makes them. Never shown.
        token: Makes what a client logs in with under AWS_MSK_IAM: a token and when it ends, in seconds since the epoch.
        replication_factor: Copies of a new topic; default 3, or as many as there are brokers.
        min_insync_replicas: Copies that must have a record before it is acknowledged; default 2 of 3, else 1.
        delivery_timeout_s: How long a record may wait for its acknowledgement before LogUnavailable. A broker that was
            killed acknowledges again after some 16 s.
        request_timeout_s: How long any other request may take before LogUnavailable.
        session_timeout_s: How long a member of a group may be silent before its partitions go to others. Brokers refuse
            less than 6 s unless told otherwise.
        max_poll_interval_s: How long a member may work on what it polled before it counts as stuck.
        metadata_refresh_s: After how long a partition that somebody else added is noticed.
        linger_ms: How long a publisher's records gather before they are sent.
    """

    servers: str
    topic_prefix: str = ""
    security: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    token: Callable[[], tuple[str, float]] | None = field(default=None, repr=False)
    replication_factor: int | None = None
    min_insync_replicas: int | None = None
    delivery_timeout_s: float = 30.0
    request_timeout_s: float = 8.0
    session_timeout_s: float = 10.0
    max_poll_interval_s: float = 300.0
    metadata_refresh_s: float = 10.0
    linger_ms: float = 3.0

    @property
    def where(self) -> str:
        """The cluster, for messages."""
        return f"Kafka at {self.servers} ({SERVERS})"


def security_of(
    *,
    protocol: str = "PLAINTEXT",
    mechanism: str = "SCRAM-SHA-512",
    username: str | None = None,
    password: str | None = None,
    ca: str | os.PathLike[str] | None = None,
    certificate: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
) -> dict[str, str]:
    """The client library's security settings, of plain values.

    Args:
        protocol: PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL.
        mechanism: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or AWS_MSK_IAM; with SASL alone.
        username: With SASL alone; not with AWS_MSK_IAM.
        password: With SASL alone; not with AWS_MSK_IAM.
        ca: PEM file of the authority that signed the brokers' certificates; default: the system's authorities.
        certificate: PEM file of this client's certificate, where brokers ask for one.
        key: PEM file of its key.

    Raises:
        LogError: A value is missing or a file is not there; the line names the setting.
    """
    settings = {"security.protocol": protocol}
    if protocol.startswith("SASL") and mechanism == MSK_IAM:
        if protocol != "SASL_SSL":
            raise LogError(f"{MECHANISM}={MSK_IAM} needs {PROTOCOL}=SASL_SSL: a token lets in whoever reads it")
        settings["sasl.mechanism"] = "OAUTHBEARER"
    elif protocol.startswith("SASL"):
        for name, value in ((USERNAME, username), (PASSWORD, password)):
            if not value:
                raise LogError(f"{PROTOCOL}={protocol} needs {name}")
        settings |= {
            "sasl.mechanism": mechanism,
            "sasl.username": username or "",
            "sasl.password": password or "",
        }
    if protocol.endswith("SSL"):
        if (certificate is None) != (key is None):
            raise LogError(f"{CERTIFICATE} and {KEY} belong together: one of them is missing")
        files = (
            (CA, "ssl.ca.location", ca),
            (CERTIFICATE, "ssl.certificate.location", certificate),
            (KEY, "ssl.key.location", key),
        )
        for name, setting, path in files:
            if path is None:
                continue
            if not os.access(path, os.R_OK):
                raise LogError(f"{name}={os.fspath(path)} is no file that can be read")
            settings[setting] = os.fspath(path)
    return settings


def options_from(
    servers: str,
    *,
    topic_prefix: str = "",
    security_protocol: str = "PLAINTEXT",
    sasl_mechanism: str = "SCRAM-SHA-512",
    sasl_username: str | None = None,
    sasl_password: str | None = None,
    ssl_ca: str | os.PathLike[str] | None = None,
    ssl_certificate: str | os.PathLike[str] | None = None,
    ssl_key: str | os.PathLike[str] | None = None,
    replication_factor: int | None = None,
    min_insync_replicas: int | None = None,
    aws_region: str | None = None,
    aws_profile: str | None = None,
) -> KafkaOptions:
    """Options of the values of the settings `GEO_ASSETS_KAFKA_*`, by their names.

    Raises:
        LogError: A value is missing, or two of them cannot both be meant; the line names the setting.
    """
    if replication_factor is not None and (min_insync_replicas or 1) > replication_factor:
        raise LogError(
            f"GEO_ASSETS_KAFKA_MIN_INSYNC_REPLICAS={min_insync_replicas} is more than "
            f"GEO_ASSETS_KAFKA_REPLICATION_FACTOR={replication_factor}: nothing could be acknowledged"
        )
    sasl = security_protocol.startswith("SASL")
    return KafkaOptions(
        servers=servers,
        topic_prefix=topic_prefix,
        token=_msk_tokens(aws_region, aws_profile) if sasl and sasl_mechanism == MSK_IAM else None,
        security=security_of(
            protocol=security_protocol,
            mechanism=sasl_mechanism,
            username=sasl_username,
            password=sasl_password,
            ca=ssl_ca,
            certificate=ssl_certificate,
            key=ssl_key,
        ),
        replication_factor=replication_factor,
        min_insync_replicas=min_insync_replicas,
    )


def _msk_tokens(region: str | None, profile: str | None) -> Callable[[], tuple[str, float]]:
    from resources.aws.tokens import TokenError, msk_tokens

    try:
        return msk_tokens(region, profile)
    except TokenError as fault:
        raise LogError(f"{MECHANISM}={MSK_IAM}: {fault}") from None
