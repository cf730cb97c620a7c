"""What can go wrong with a local service; each fault's text is one line that says what to do."""

from __future__ import annotations


class ServiceFault(Exception):
    """A service could not be started, stopped or asked; `tail` is the end of its log, where that helps."""

    def __init__(self, message: str, tail: str = "") -> None:
        super().__init__(message)
        self.tail = tail


class UnknownService(ServiceFault):
    """No service has this name."""


class MissingProgram(ServiceFault):
    """A program that the service consists of is not installed here."""


class PortTaken(ServiceFault):
    """Another program listens on the port that the service had."""


class NotReady(ServiceFault):
    """The service was started and does not answer, or ended."""
