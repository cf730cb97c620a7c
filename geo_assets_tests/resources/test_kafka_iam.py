"""Kafka by tokens, as MSK's IAM has it: a real broker with TLS and SASL/OAUTHBEARER, and tokens that end in seconds."""

from __future__ import annotations

import base64
import itertools
import json
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from geo_assets_tests.needs import missing
from geo_assets_tests.resources.kafka_broker import GuardedKafka
from geo_assets_tests.waiting import patient
from resources.event_log.kafka import KafkaEventLog
from resources.event_log.kafka_faults import Watch
from resources.event_log.kafka_options import KafkaOptions, options_from
from resources.event_log.kafka_tokens import Tokens
from resources.event_log.protocol import LogError, LogUnavailable, NewRecord, TopicSpec
from scripts.local_services.faults import MissingProgram
from scripts.local_services.service import CHECKOUT, HOST

REAUTHENTICATES_MS = 4_000
"""The broker ends a session that has not shown a new token for so long, or when its token ends."""


class IamKafka(GuardedKafka):
    """With a listener that takes unsigned tokens: whom they name is who came."""

    ports = (*GuardedKafka.ports, "iam")

    def prepare(self, state: dict[str, Any]) -> None:
        super().prepare(state)
        properties = self.folder / "server.properties"
        lines = [
            line + f",IAM://{HOST}:{state['ports']['iam']}" if line.startswith(("listeners=", "advertised.")) else
            line + ",IAM:SASL_SSL" if line.startswith("listener.security.protocol.map=") else
            "super.users=User:ANONYMOUS;User:maps" if line.startswith("super.users=") else line
            for line in properties.read_text().splitlines()
        ]  # fmt: skip
        module = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
        lines += [
            "listener.name.iam.sasl.enabled.mechanisms=OAUTHBEARER",
            f'listener.name.iam.oauthbearer.sasl.jaas.config={module} required unsecuredLoginStringClaim_sub="broker";',
            f"listener.name.iam.oauthbearer.connections.max.reauth.ms={REAUTHENTICATES_MS}",
        ]
        properties.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IamKafka]:
    broker = IamKafka(tmp_path_factory.mktemp("broker") / "kafka", CHECKOUT / ".services" / "downloads")
    try:
        broker.start({})
    except MissingProgram as fault:
        missing(str(fault))
    state = broker.state()
    assert state is not None
    # A broker's first handshake loads half of Java's cryptography: longer than a client waits on a busy machine.
    plain = socket.create_connection((HOST, state["ports"]["iam"]), timeout=patient(60))
    with ssl.create_default_context(cafile=str(broker.certificate)).wrap_socket(plain, server_hostname=HOST):
        pass
    yield broker
    broker.remove()


def unsigned(user: str, seconds: float) -> tuple[str, float]:
    """A token without a signature, and when it ends."""
    now = time.time()

    def part(value: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    claims = {"sub": user, "iat": now, "exp": now + seconds}
    return f"{part({'alg': 'none'})}.{part(claims)}.", now + seconds


def options_of(broker: IamKafka, token: Any) -> KafkaOptions:
    state = broker.state()
    assert state is not None
    found = options_from(
        f"{HOST}:{state['ports']['iam']}",
        security_protocol="SASL_SSL",
        sasl_mechanism="AWS_MSK_IAM",
        ssl_ca=broker.certificate,
        aws_region="eu-west-1",
    )
    return replace(found, token=token, request_timeout_s=patient(15))


@pytest.mark.service("kafka")
def test_a_client_that_logs_in_with_tokens_goes_on_when_they_end(broker: IamKafka) -> None:
    given: list[float] = []

    def token() -> tuple[str, float]:
        given.append(time.monotonic())
        return unsigned("maps", 8)

    log = KafkaEventLog(options_of(broker, token))
    log.ensure_topics([TopicSpec("raw")])
    count, began = 0, time.monotonic()
    # Longer than a token lives, and than the broker bears a session without a new one.
    while time.monotonic() < began + 9 or len([at for at in given if at > began + 2]) < 2:
        assert time.monotonic() < began + patient(90), "no newer token was asked for"
        log.append([NewRecord("raw", key="k", value=b"%d" % count)])
        count += 1
        time.sleep(0.25)
    kept = sum(extent.end for extent in log.extents("raw").values())
    log.close()

    assert kept == count > 0


@pytest.mark.service("kafka")
def test_a_role_that_may_do_nothing_is_named_by_the_mechanism(broker: IamKafka) -> None:
    log = KafkaEventLog(options_of(broker, lambda: unsigned("stranger", 60)))
    with pytest.raises(LogError, match="this role") as raised:
        log.ensure_topics([TopicSpec("strange")])
    log.close()
    assert "GEO_ASSETS_KAFKA_SASL_MECHANISM" in str(raised.value)
    assert "USERNAME" not in str(raised.value)


@pytest.mark.service("kafka")
def test_a_token_that_the_broker_refuses_is_one_clear_error(broker: IamKafka) -> None:
    log = KafkaEventLog(options_of(broker, lambda: ("no-token-at-all", time.time() + 60)))
    with pytest.raises(LogUnavailable, match="refuses this role's token") as raised:
        log.ensure_topics([TopicSpec("raw")])
    log.close()
    assert "no-token-at-all" not in str(raised.value)


def test_a_provider_that_fails_is_one_error_at_once_that_names_the_setting() -> None:
    def token() -> tuple[str, float]:
        raise RuntimeError("no AWS credentials:\n nowhere")

    options = options_from(
        "127.0.0.1:1", security_protocol="SASL_SSL", sasl_mechanism="AWS_MSK_IAM", aws_region="eu-west-1"
    )
    log = KafkaEventLog(replace(options, token=token))
    with pytest.raises(LogUnavailable) as raised:
        log.ensure_topics([TopicSpec("raw")])
    log.close()
    text = str(raised.value)
    assert "GEO_ASSETS_KAFKA_SASL_MECHANISM=AWS_MSK_IAM" in text
    assert text.endswith("no AWS credentials: nowhere")


def test_while_no_new_token_is_to_be_had_the_last_one_is_used_until_it_ends() -> None:
    watch = Watch(KafkaOptions("127.0.0.1:1", token=lambda: ("", 0.0)))
    ends, calls = time.time() + 60, itertools.count()

    def token() -> tuple[str, float]:
        if next(calls):
            raise RuntimeError("STS is away")
        return "first", ends

    tokens = Tokens(token, watch)
    tokens.prepare()
    assert tokens(None) == ("first", ends)
    assert tokens(None) == ("first", ends)
    assert watch.refusal() is None

    ends = time.time() - 1
    tokens._last = ("first", ends)  # pyright: ignore[reportPrivateUsage]
    assert tokens(None)[0] != "first"


def test_tokens_go_over_tls_alone() -> None:
    with pytest.raises(LogError, match="GEO_ASSETS_KAFKA_SECURITY_PROTOCOL=SASL_SSL"):
        options_from("127.0.0.1:1", security_protocol="SASL_PLAINTEXT", sasl_mechanism="AWS_MSK_IAM")


def test_the_signer_makes_a_token_of_the_chain_s_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from resources.aws import tokens

    tokens._credentials.cache_clear()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-to-be-shown")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    token, ends = tokens.msk_tokens("eu-west-1")()
    tokens._credentials.cache_clear()  # pyright: ignore[reportPrivateUsage]

    url = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
    assert url.startswith("https://kafka.eu-west-1.amazonaws.com/?Action=kafka-cluster%3AConnect")
    assert "AKIDEXAMPLE" in url
    assert "not-to-be-shown" not in url
    assert 600 < ends - time.time() <= 901
