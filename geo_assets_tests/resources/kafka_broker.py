"""A Kafka of its own for tests that kill it, or that need what the shared one has not: rights and TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from geo_assets_tests.needs import missing
from scripts.local_services.kafka import Kafka
from scripts.local_services.service import CHECKOUT, HOST


class GuardedKafka(Kafka):
    """Whoever comes with a password needs rights, which nobody has at first; there is a TLS listener, too."""

    ports = (*Kafka.ports, "ssl")

    def prepare(self, state: dict[str, Any]) -> None:
        super().prepare(state)
        properties = self.folder / "server.properties"
        if not self.certificate.exists():
            self._make_certificate()
        tls = f"SSL://{HOST}:{state['ports']['ssl']}"
        lines = [
            line + f",{tls}" if line.startswith(("listeners=", "advertised.listeners=")) else
            line + ",SSL:SSL" if line.startswith("listener.security.protocol.map=") else line
            for line in properties.read_text().splitlines()
        ]  # fmt: skip
        lines += [
            # One that was killed is let in again only when its session of before has run out.
            "broker.session.timeout.ms=3000",
            "broker.heartbeat.interval.ms=500",
            "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users=User:ANONYMOUS",
            "ssl.keystore.type=PEM",
            f"ssl.keystore.location={self.folder / 'broker.pem'}",
        ]
        properties.write_text("\n".join(lines) + "\n")

    @property
    def certificate(self) -> Path:
        """PEM file of the broker's certificate, which signed itself."""
        return self.folder / "certificate.pem"

    def setting(self, name: str) -> str:
        """One of the variables by which it is found; `ssl` for its TLS listener."""
        state = self.state()
        assert state is not None
        return f"{HOST}:{state['ports']['ssl']}" if name == "ssl" else self.settings(state)[name]

    def _make_certificate(self) -> None:
        key = self.folder / "key.pem"
        made = subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=broker"),
                *("-addext", f"subjectAltName=IP:{HOST}", "-keyout", str(key), "-out", str(self.certificate)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert made.returncode == 0, made.stderr
        (self.folder / "broker.pem").write_text(key.read_text() + self.certificate.read_text())


def started(folder: Path) -> GuardedKafka:
    """Start one in an empty folder."""
    from scripts.local_services.faults import MissingProgram

    broker = GuardedKafka(folder, CHECKOUT / ".services" / "downloads")
    try:
        broker.start({})
    except MissingProgram as fault:
        missing(str(fault))
    return broker
