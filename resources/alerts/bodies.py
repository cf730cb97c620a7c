"""How a message reads in each format that receivers take. Pure: message in, JSON out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from resources.alerts.protocol import Alert, Message

Format = Literal["auto", "slack", "alertmanager", "json"]
FORMATS: tuple[str, ...] = get_args(Format)

API_PATH = "/api/v2/alerts"
"""Where Alertmanager itself takes alerts: a list, another shape than what it sends to webhooks."""

FIRING_MS = 30 * 24 * 3_600_000
"""How long Alertmanager keeps an alert without hearing of it again: without an end it takes five minutes, and would
then call resolved what still fails. The recovery ends it."""

SLACK_ALERTS = 20
"""Alerts shown: Slack takes 50 blocks of a message."""
SLACK_TEXT = 2_900
"""Characters of a block's text: Slack takes 3,000."""
SHOWN = 5
"""Partitions named in a text for people."""


def format_of(chosen: str, host: str, path: str) -> str:
    """The format for an address: what the setting says, or what its address tells where that is `auto`."""
    if chosen != "auto":
        return chosen
    if host == "hooks.slack.com" or host.endswith(".slack.com"):
        return "slack"
    if path.rstrip("/").endswith(API_PATH):
        return "alertmanager"
    return "json"


def body_of(chosen: str, path: str, message: Message) -> bytes:
    """The body of a message.

    Args:
        chosen: `slack`, `alertmanager` or `json`.
        path: Of the address: Alertmanager's own takes a list of alerts, others what Alertmanager sends to webhooks.
        message: The message.
    """
    if chosen == "alertmanager" and path.rstrip("/").endswith(API_PATH):
        return _encoded(postable(message))
    makers: Mapping[str, Callable[[Message], Any]] = {
        "slack": slack,
        "alertmanager": alertmanager,
        "json": plain,
    }
    return _encoded(makers[chosen](message))


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def title(message: Message) -> str:
    """The message in a few words."""
    firing = [alert for alert in message.alerts if alert.status == "firing"]
    over = len(message.alerts) - len(firing)
    if len(message.alerts) == 1:
        return headline(message.alerts[0])
    parts = [f"{len(firing)} failing" if firing else "", f"{over} recovered" if over else ""]
    names = sorted({alert.name for alert in firing or message.alerts})
    return f"{', '.join(filter(None, parts))}: {', '.join(names[:4])}{' …' if len(names) > 4 else ''}"


def headline(alert: Alert) -> str:
    """An alert in a few words."""
    where = f" in region {alert.region}" if alert.region else ""
    what = f"runs of {alert.name}" if alert.kind == "run" else f"check {alert.name}"
    if alert.status == "resolved":
        return f"Recovered: {what}{where}"
    verb = "fail" if alert.kind == "run" else "fails"
    return f"{alert.severity.capitalize()}: {what} {verb}{where}"


def moment(ms: int) -> str:
    """RFC 3339 in UTC of milliseconds since the epoch."""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def plain(message: Message) -> dict[str, Any]:
    """Our own shape: everything, under the names of the protocol."""
    return {
        "id": message.id,
        "at": moment(message.at_ms),
        "title": title(message),
        "alerts": [
            {
                **{k: v for k, v in asdict(alert).items() if k not in ("since_ms", "at_ms")},
                "since": moment(alert.since_ms),
                "at": moment(alert.at_ms),
            }
            for alert in message.alerts
        ],
    }


_SEVERITIES: Mapping[str, str] = {"error": "critical", "warning": "warning"}
"""As Prometheus' users name them: routes of Alertmanager go by these."""


def _labels(alert: Alert, severity: str | None = None) -> dict[str, str]:
    """What makes it the same alert for Alertmanager. Nothing but the severity in here may change while it fires."""
    return {
        "alertname": alert.name.replace("/", "_") if alert.kind == "check" else f"{alert.name}_failed",
        "severity": _SEVERITIES[severity or alert.severity],
        "service": "geo_assets",
        "kind": alert.kind,
        "name": alert.name,
        "key": alert.key,
    }


def _annotations(alert: Alert) -> dict[str, str]:
    failing = "; ".join(f"{one.subject} {one.problem}".strip() for one in alert.failing[:SHOWN])
    found = {
        "summary": headline(alert),
        "description": alert.summary,
        "region": alert.region,
        "count": str(alert.count),
        "failing": failing,
        "map": alert.map_url,
    }
    return {name: text for name, text in found.items() if text}


def _alert_of(alert: Alert, message: Message, labels: dict[str, str]) -> dict[str, Any]:
    ends_ms = alert.at_ms if alert.status == "resolved" else message.at_ms + FIRING_MS
    return {
        "labels": labels,
        "annotations": _annotations(alert),
        "startsAt": moment(alert.since_ms),
        "endsAt": moment(ends_ms),
        "generatorURL": alert.url,
    }


def postable(message: Message) -> list[dict[str, Any]]:
    """What Alertmanager takes at `/api/v2/alerts` (its OpenAPI: `postableAlerts`).

    An alert whose severity changed is another one there: that of the other severity is ended beside it.
    """
    found: list[dict[str, Any]] = []
    for alert in message.alerts:
        found.append(_alert_of(alert, message, _labels(alert)))
        other = "warning" if alert.severity == "error" else "error"
        ended = replace(alert, status="resolved")
        found.append(_alert_of(ended, message, _labels(alert, other)))
    return found


def alertmanager(message: Message) -> dict[str, Any]:
    """What Alertmanager sends to webhooks, version 4: for receivers that are made for it."""
    alerts: list[dict[str, Any]] = []
    for alert in message.alerts:
        one = _alert_of(alert, message, _labels(alert))
        if alert.status == "firing":
            one["endsAt"] = "0001-01-01T00:00:00Z"
        alerts.append({"status": alert.status, **one, "fingerprint": alert.key})
    firing = any(alert.status == "firing" for alert in message.alerts)
    return {
        "version": "4",
        "groupKey": "geo_assets",
        "truncatedAlerts": 0,
        "status": "firing" if firing else "resolved",
        "receiver": "geo_assets",
        "groupLabels": {"service": "geo_assets"},
        "commonLabels": _common([alert["labels"] for alert in alerts]),
        "commonAnnotations": _common([alert["annotations"] for alert in alerts]),
        "externalURL": message.alerts[0].url,
        "alerts": alerts,
    }


def _common(each: list[dict[str, str]]) -> dict[str, str]:
    return {name: text for name, text in each[0].items() if all(other.get(name) == text for other in each)}


def slack(message: Message) -> dict[str, Any]:
    """An incoming webhook's message: `text` for notifications, blocks for readers."""
    blocks: list[dict[str, Any]] = []
    for alert in message.alerts[:SLACK_ALERTS]:
        icon = ":white_check_mark:" if alert.status == "resolved" else _ICONS[alert.severity]
        lines = [f"{icon} *{_link(alert.url, headline(alert))}*", _escaped(alert.summary)]
        if alert.status == "firing":
            for one in alert.failing[:SHOWN]:
                lines.append(f"• {_link(one.map_url, one.subject)} {_escaped(one.problem)}".rstrip())
            if alert.kind == "check" and alert.count > min(SHOWN, len(alert.failing)) and alert.failing:
                lines.append(f"and {alert.count - min(SHOWN, len(alert.failing)):,} more")
            if alert.map_url:
                lines.append(_link(alert.map_url, "on the map"))
        blocks.append({"type": "section", "text": {"type": "mrkdwn", "text": _cut("\n".join(lines))}})
    left = len(message.alerts) - SLACK_ALERTS
    if left > 0:
        text = f"and {left} more: {_escaped(', '.join(sorted({a.name for a in message.alerts[SLACK_ALERTS:]})))}"
        blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": _cut(text)}]})
    return {"text": _escaped(title(message)), "blocks": blocks}


_ICONS = {"error": ":red_circle:", "warning": ":warning:"}


def _escaped(text: str) -> str:
    """Slack's three control characters, as it wants them."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _link(url: str, text: str) -> str:
    clean = _escaped(text).replace("|", "/")
    return f"<{url}|{clean}>" if url else clean


def _cut(text: str) -> str:
    """At the end of a line: a link that is cut in two shows its address."""
    if len(text) <= SLACK_TEXT:
        return text
    kept = text[:SLACK_TEXT].rpartition("\n")[0] or text[:SLACK_TEXT]
    return f"{kept}\n…"
