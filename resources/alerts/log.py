"""Alerts as lines of the log: what there is where no webhook is named."""

from __future__ import annotations

import structlog

from resources.alerts.protocol import Message

CHANNEL = "log"


class LogAlerts:
    """One line an alert (`Alerts`): errors as `error`, warnings as `warning`, what is over as `info`."""

    @property
    def channels(self) -> tuple[str, ...]:
        """The log."""
        return (CHANNEL,)

    def send(self, channel: str, message: Message) -> None:
        """Write the lines.

        Raises:
            KeyError: It is another channel.
        """
        if channel != CHANNEL:
            raise KeyError(channel)
        log = structlog.get_logger()
        for alert in message.alerts:
            write = log.info if alert.status == "resolved" else getattr(log, alert.severity)
            write(
                "alert",
                status=alert.status,
                name=alert.name,
                region=alert.region or None,
                count=alert.count,
                summary=alert.summary,
                failing=[one.subject for one in alert.failing],
                url=alert.url,
                message=message.id,
            )

    def close(self) -> None:
        """There is nothing to release."""
