"""What Kafka's errors mean: one line each, in the event log's own error classes, naming the setting to look at."""

from __future__ import annotations

import logging
import re
import threading
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from resources.event_log.kafka_options import CA, MECHANISM, MSK_IAM, PASSWORD, PROTOCOL, USERNAME, KafkaOptions
from resources.event_log.protocol import (
    InvalidRecord,
    LogError,
    LogUnavailable,
    RecordTooLarge,
    UnknownPartition,
    UnknownTopic,
)

UNKNOWN_TOPIC = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_ID})
DENIED = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
PASSING = frozenset(
    {
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError._WAIT_COORD,
        KafkaError._TRANSPORT,
    }
)
"""Over by themselves within moments: a leader moves, a coordinator loads, a connection is made anew."""

_REFUSALS = frozenset({KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._SSL})
"""Waiting does not mend these."""
_HEARD = _REFUSALS | {KafkaError._RESOLVE, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN}


class Watch:
    """Listens to a client's errors and log lines, so that a call that got no answer can say why."""

    def __init__(self, options: KafkaOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._refusal: str | None = None
        self._last: str | None = None
        self.down = False
        """No broker was connected at some time since `forget`."""
        self.token_fault: str | None = None
        """Why there is no new token to log in with; None while there is one."""

    def heard(self, error: KafkaError) -> None:
        """An error of the client as a whole (`error_cb`)."""
        if error.code() not in _HEARD:
            return
        with self._lock:
            if error.code() in _REFUSALS:
                self._refusal = error.str()
            elif error.code() == KafkaError._ALL_BROKERS_DOWN:
                self.down = True
            else:
                self._last = error.str()

    def log(self, level: int, message: str, *args: Any) -> None:
        """Take a log line of the client library, which would write it to standard error: `logger` of its settings.

        It goes on as a debug line of `librdkafka`: an outage is told by errors, once, and here many times a second.
        """
        del level
        logging.getLogger("librdkafka").debug(message, *args)
        if args and args[0] == "FAIL":
            with self._lock:
                self._last = re.sub(r"^\[thrd:.*?\]: ", "", str(args[-1]))

    def forget(self) -> None:
        """What was heard before counts no more."""
        with self._lock:
            self._refusal = self._last = None
            self.down = False

    def refusal(self) -> LogUnavailable | None:
        """The broker turned this client away since `forget`: wrong password, untrusted certificate."""
        text = self._refusal
        if text is None:
            return None
        if self.token_fault is not None:
            return self.no_token()
        if "ssl" in text.lower() and "sasl authentication" not in text.lower():
            return LogUnavailable(
                f"{self._options.where} and this client do not agree on TLS ({PROTOCOL}, {CA}): {_line(text)}"
            )
        if self._options.token is not None:
            return LogUnavailable(
                f"{self._options.where} refuses this role's token ({MECHANISM}={MSK_IAM}): it needs "
                f"kafka-cluster:Connect on this cluster: {_line(text)}"
            )
        return LogUnavailable(
            f"{self._options.where} refuses this user: look at {USERNAME} and {PASSWORD}: {_line(text)}"
        )

    def no_token(self) -> LogUnavailable:
        """There is no token to log in with."""
        return LogUnavailable(
            f"{self._options.where}: no token to log in with ({MECHANISM}={MSK_IAM}): {self.token_fault}"
        )

    def unavailable(self, doing: str, error: KafkaError | None = None) -> LogUnavailable:
        """No answer came; why, as far as it is known."""
        refusal = self.refusal()
        if refusal is not None:
            return refusal
        why = self._last or (error.str() if error is not None else "")
        hint = f"; is {PROTOCOL} right?" if "security.protocol" in why or "closed by peer" in why else ""
        return LogUnavailable(f"{self._options.where} does not answer ({doing}){': ' if why else ''}{_line(why)}{hint}")

    def explained(self, error: KafkaError, doing: str) -> LogError:
        """An error as one of the event log's own.

        Args:
            error: What the client or the broker said.
            doing: What was asked for, such as `append to raw`.
        """
        code = error.code()
        text = f"{doing}: {_line(error.str())}"
        if code in UNKNOWN_TOPIC:
            return UnknownTopic(f"{text} ({self._options.where})")
        if code == KafkaError._UNKNOWN_PARTITION:
            return UnknownPartition(text)
        if code == KafkaError.MSG_SIZE_TOO_LARGE:
            return RecordTooLarge(text)
        if code in (KafkaError.INVALID_TIMESTAMP, KafkaError.INVALID_RECORD, KafkaError.INVALID_MSG):
            return InvalidRecord(text)
        if code in DENIED:
            if self._options.token is not None:
                return LogError(f"{self._options.where} does not let this role ({MECHANISM}={MSK_IAM}) do this: {text}")
            user = self._options.security.get("sasl.username", "")
            return LogError(f"{self._options.where} does not let user {user!r} ({USERNAME}) do this: {text}")
        if code in _REFUSALS:
            self.heard(error)
        if code in (KafkaError._INVALID_ARG, KafkaError.INVALID_CONFIG, KafkaError.POLICY_VIOLATION):
            return LogError(f"{text} ({self._options.where})")
        return self.unavailable(doing, error)


def error_of(raised: KafkaException) -> KafkaError:
    """The error in an exception."""
    return raised.args[0]


def _line(text: str) -> str:
    """One line, without the repetition counts that librdkafka adds."""
    return " ".join(text.split())[:300]
