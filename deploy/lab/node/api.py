"""The node's client of the API server: plain objects as JSON, watches that start anew by themselves."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

Object = dict[str, Any]

_AGAIN_S = 0.5
_WATCH_S = 300


class Refused(Exception):
    """The API server's answer was no success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Unreachable(Exception):
    """The API server did not answer."""


class Api:
    """Calls to one API server with the administrator's certificate.

    Args:
        url: Where it is.
        keys: The folder with ca.crt, admin.crt and admin.key.
    """

    def __init__(self, url: str, keys: Path) -> None:
        context = ssl.create_default_context(cafile=str(keys / "ca.crt"))
        context.load_cert_chain(keys / "admin.crt", keys / "admin.key")
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=16)
        self._client = httpx.Client(base_url=url, verify=context, timeout=10, limits=limits, trust_env=False)

    def get(self, path: str, **query: str) -> Object:
        """Read an object or a list."""
        return self._call("GET", path, query=query)

    def create(self, path: str, content: Object) -> Object:
        """Create an object in a collection."""
        return self._call("POST", path, content)

    def patch(self, path: str, content: Object) -> Object:
        """Change an object; lists of keyed entries are merged entry by entry."""
        return self._call("PATCH", path, content, kind="application/strategic-merge-patch+json")

    def delete(self, path: str, content: Object) -> Object:
        """Delete an object, with the options given."""
        return self._call("DELETE", path, content)

    def _call(
        self, method: str, path: str, content: Object | None = None, *, query: dict[str, str] | None = None,
        kind: str = "application/json",
    ) -> Object:  # fmt: skip
        try:
            answer = self._client.request(
                method, path, params=query, content=json.dumps(content) if content is not None else None,
                headers={"Content-Type": kind},
            )  # fmt: skip
        except httpx.HTTPError as fault:
            raise Unreachable(str(fault)) from fault
        if answer.is_success:
            return answer.json()
        try:
            message = answer.json().get("message", answer.text)
        except ValueError:
            message = answer.text
        raise Refused(answer.status_code, message)

    def follow(self, path: str, seen: Callable[[dict[str, Object]], None], **query: str) -> threading.Thread:
        """Keep a copy of a collection up to date in a thread of its own; `seen` gets all of it after every change.

        Args:
            path: The collection.
            seen: Called in that thread with the objects by uid.
            query: Selectors.
        """

        def run() -> None:
            while True:
                try:
                    self._follow_once(path, seen, query)
                except (Refused, Unreachable, httpx.HTTPError, ValueError) as fault:
                    print(f"watch of {path}: {fault!r}"[:300], flush=True)
                    time.sleep(_AGAIN_S)

        thread = threading.Thread(target=run, daemon=True, name=f"watch {path}")
        thread.start()
        return thread

    def _follow_once(self, path: str, seen: Callable[[dict[str, Object]], None], query: dict[str, str]) -> None:
        listed = self.get(path, **query)
        objects = {each["metadata"]["uid"]: each for each in listed.get("items") or []}
        seen(dict(objects))
        asked = {
            **query, "watch": "true", "resourceVersion": listed["metadata"]["resourceVersion"],
            "timeoutSeconds": str(_WATCH_S),
        }  # fmt: skip
        timeout = httpx.Timeout(10, read=_WATCH_S + 30)
        with self._client.stream("GET", path, params=asked, timeout=timeout) as answer:
            if not answer.is_success:
                raise Refused(answer.status_code, "watch")
            for line in answer.iter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                uid = event["object"]["metadata"]["uid"]
                if event["type"] == "DELETED":
                    objects.pop(uid, None)
                else:
                    objects[uid] = event["object"]
                seen(dict(objects))
