"""Alerts over HTTP: a POST to each webhook, as Slack, Alertmanager and receivers of plain JSON take it."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cached_property

import httpx

from resources.alerts.bodies import FORMATS, body_of, format_of
from resources.alerts.protocol import AlertsMisconfigured, Message, NotDelivered

SETTING = "GEO_ASSETS_ALERT_WEBHOOK_URLS"

TIMEOUT_S = 5.0
"""From the first byte to the answer's status, all in all: a sensor's tick waits for it."""

MOST_WAIT_S = 3_600.0
"""Longest that a receiver may ask to be left alone: one that says a year must not silence alerts for a year."""

Sign = Callable[[str, int, bytes], Mapping[str, str]]
"""Message id, seconds since the epoch, body -> headers that vouch for it."""


@dataclass(frozen=True, slots=True)
class _Webhook:
    url: httpx.URL
    auth: tuple[str, str] | None
    format: str


class HttpAlerts:
    """A POST to each webhook (`Alerts`). Taken is what is answered 2xx; redirects are not followed.

    A channel is named by its host and a few digits of a hash: paths and queries of webhooks are secrets.

    Args:
        urls: `https://user:password@host/path?query`, one each; user and password go into basic authentication.
        format: `slack`, `alertmanager`, `json`, or `auto`: by the address.
        sign: Makes headers that vouch for a body; None sends none.
        timeout_s: From the first byte to the status.
        clock: Seconds since the epoch.

    Raises:
        AlertsMisconfigured: There is no address, one is no http or https URL, or the format is none.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        format: str = "auto",
        sign: Sign | None = None,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not urls:
            raise AlertsMisconfigured(f"{SETTING} names no webhook")
        if format not in FORMATS:
            raise AlertsMisconfigured(f"GEO_ASSETS_ALERT_FORMAT: {format!r} is none of {', '.join(FORMATS)}")
        self._webhooks = dict(_webhook(url, format) for url in urls)
        self._sign, self._timeout_s, self._clock = sign, timeout_s, clock

    @cached_property
    def _client(self) -> httpx.Client:
        """Made for the first message: it reads the machine's certificates, and most ticks have nothing to say."""
        return httpx.Client(
            timeout=self._timeout_s,
            follow_redirects=False,
            headers={"User-Agent": "geo-assets", "Content-Type": "application/json"},
        )

    @property
    def channels(self) -> tuple[str, ...]:
        """The webhooks, in the order of the setting."""
        return tuple(self._webhooks)

    def send(self, channel: str, message: Message) -> None:
        """Send the message once.

        Raises:
            NotDelivered: It was not taken, or not in time.
            KeyError: There is no such channel.
        """
        webhook = self._webhooks[channel]
        body = body_of(webhook.format, webhook.url.path, message)
        # The id also stands in a header of its own, for receivers whose body has no room for it.
        headers = {"Idempotency-Key": message.id}
        if self._sign is not None:
            headers |= self._sign(message.id, int(self._clock()), body)
        outcome: list[httpx.Response | Exception] = []

        def post() -> None:
            try:
                request = self._client.build_request("POST", webhook.url, content=body, headers=headers)
                answer = self._client.send(request, auth=webhook.auth, stream=True)
                answer.close()  # What it says beside its status is nobody's.
                outcome.append(answer)
            except Exception as fault:
                outcome.append(fault)

        # In a thread that may be left behind: httpx limits each read, and a receiver that drips bytes ends none.
        thread = threading.Thread(target=post, daemon=True, name="alert")
        thread.start()
        thread.join(self._timeout_s)
        found = outcome[0] if outcome else None
        if found is None:
            raise NotDelivered(channel, f"no answer within {self._timeout_s:g} s")
        if isinstance(found, httpx.Response):
            if not found.is_success:
                raise NotDelivered(channel, f"it answered {found.status_code}", self._wait_s(found))
            return
        if not isinstance(found, httpx.HTTPError):
            raise found
        # The text of a transport's error may hold the address.
        raise NotDelivered(channel, f"{type(found).__name__}: {_told(found)}") from None

    def close(self) -> None:
        """Close the connections."""
        client = self.__dict__.pop("_client", None)
        if client is not None:
            client.close()

    def _wait_s(self, answer: httpx.Response) -> float:
        """`Retry-After` (RFC 9110, 10.2.3): seconds or a date."""
        text = answer.headers.get("Retry-After", "")
        if text.isascii() and text.isdigit():
            seconds = float(text[:9])
        else:
            try:
                seconds = parsedate_to_datetime(text).timestamp() - self._clock()
            except (TypeError, ValueError):
                return 0.0
        return min(max(seconds, 0.0), MOST_WAIT_S)


def _webhook(text: str, format: str) -> tuple[str, _Webhook]:
    try:
        url = httpx.URL(text)
        if not url.host or url.scheme not in ("http", "https"):
            raise ValueError
    except (httpx.InvalidURL, ValueError):
        raise AlertsMisconfigured(f"{SETTING} has an address that is no http or https URL with a host") from None
    auth = (url.username, url.password) if url.username or url.password else None
    bare = url.copy_with(username=None, password=None)
    digits = hashlib.sha256(text.encode()).hexdigest()[:6]
    port = "" if url.port is None else f":{url.port}"
    return f"{url.host}{port}#{digits}", _Webhook(bare, auth, format_of(format, url.host, url.path))


def _told(fault: httpx.HTTPError) -> str:
    """The system's own words, which know of no path and no password."""
    cause: BaseException | None = fault
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return "the connection broke"
