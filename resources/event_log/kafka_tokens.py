"""Tokens by which a client logs in (SASL/OAUTHBEARER): a new one before the last one ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from resources.event_log.kafka_faults import Watch

Token = tuple[str, float]

_NONE: Token = ("-", 1.0)
"""An exception in its callback breaks the client library; a token that ended long ago is refused in good order."""


class Tokens:
    """One client's `oauth_cb`. The library asks in a thread of its own when four fifths of a token's time are over.

    Args:
        make: A token and when it ends, in seconds since the epoch. Whatever it raises is a token that there is not.
        watch: Learns why there is none, so that a call without an answer can say so.
    """

    def __init__(self, make: Callable[[], Token], watch: Watch) -> None:
        self._make, self._watch = make, watch
        self._lock = threading.Lock()
        self._last: Token | None = None
        self._fresh = False

    def prepare(self) -> None:
        """Have a first token: without one the library would wait for ten seconds and then not say why.

        Raises:
            LogUnavailable: There is none.
        """
        with self._lock:
            self._fresh = self._renew()
        if not self._fresh:
            raise self._watch.no_token()

    def __call__(self, _: object) -> Token:
        """The next token; the last one for as long as it holds, where none is to be had."""
        with self._lock:
            if self._fresh:
                self._fresh = False
            elif not self._renew() and self._last is not None and self._last[1] > time.time() + 1:
                return self._last
            elif self._watch.token_fault is not None:
                return _NONE
            return self._last or _NONE

    def _renew(self) -> bool:
        try:
            self._last = self._make()
        except Exception as fault:
            text = " ".join(str(fault).split())[:300] or type(fault).__name__
            self._watch.token_fault = text
            logging.getLogger("geo_assets.kafka").warning("no new token to log in with: %s", text)
            return False
        self._watch.token_fault = None
        return True
