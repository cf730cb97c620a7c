"""Kafka: one KRaft node from Maven Central's jars, with a plain listener and one that asks for a password."""

from __future__ import annotations

import base64
import fcntl
import os
import re
import shutil
import socket
import struct
import subprocess
import uuid
from pathlib import Path
from typing import Any

from scripts.local_services.faults import MissingProgram, NotReady
from scripts.local_services.service import HOST, Service, program, write_private

_POM = Path(__file__).with_name("kafka_pom.xml")
_USER = "geo_assets"
_METADATA_V1 = struct.pack(">hhih", 3, 1, 1, -1) + struct.pack(">i", 0)
"""A Metadata request, version 1, without a client id, that asks for no topic."""


class Kafka(Service):
    """Broker and controller in one Java process; topics are made by those who need them, never by a typo."""

    name = "kafka"
    ports = ("plaintext", "sasl", "controller")
    secrets = ("password",)
    start_seconds = 120.0

    def check_programs(self) -> None:
        self._java()
        if not self._jars().is_dir():
            program("mvn", "Debian and Ubuntu have it in the package maven")

    def prepare(self, state: dict[str, Any]) -> None:
        self._fetch()
        ports, password = state["ports"], state["secrets"]["password"]
        plain = "org.apache.kafka.common.security.plain.PlainLoginModule"
        scram = "org.apache.kafka.common.security.scram.ScramLoginModule"
        properties = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@{HOST}:{ports['controller']}",
            "listeners": f"PLAINTEXT://{HOST}:{ports['plaintext']},SASL_PLAINTEXT://{HOST}:{ports['sasl']},"
            f"CONTROLLER://{HOST}:{ports['controller']}",
            "advertised.listeners": f"PLAINTEXT://{HOST}:{ports['plaintext']},SASL_PLAINTEXT://{HOST}:{ports['sasl']}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
            "controller.listener.names": "CONTROLLER",
            "sasl.enabled.mechanisms": "SCRAM-SHA-512,PLAIN",
            "listener.name.sasl_plaintext.scram-sha-512.sasl.jaas.config": f"{scram} required;",
            "listener.name.sasl_plaintext.plain.sasl.jaas.config": f'{plain} required user_{_USER}="{password}";',
            "log.dirs": self.data,
            "auto.create.topics.enable": "false",
            "group.initial.rebalance.delay.ms": 0,
            "offsets.topic.replication.factor": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            # One node for tests: the defaults are made for a cluster and cost seconds at each start.
            "offsets.topic.num.partitions": 4,
            "transaction.state.log.num.partitions": 4,
            "share.coordinator.state.topic.num.partitions": 4,
            "num.network.threads": 2,
            "num.io.threads": 4,
            "log.cleaner.dedupe.buffer.size": 32_000_000,
        }
        text = "\n".join(f"{key}={value}" for key, value in properties.items())
        write_private(self.folder / "server.properties", text + "\n")
        if not (self.data / "meta.properties").exists():
            shutil.rmtree(self.data, ignore_errors=True)
            self._format(password)

    def command(self, state: dict[str, Any]) -> list[str]:
        heap = ["-Xms128m", "-Xmx512m", "-XX:+ExitOnOutOfMemoryError"]
        return [*self._run(*heap), "kafka.Kafka", str(self.folder / "server.properties")]

    def answers(self, state: dict[str, Any]) -> bool:
        with socket.create_connection((HOST, state["ports"]["plaintext"]), timeout=2) as connection:
            connection.settimeout(5)
            connection.sendall(struct.pack(">i", len(_METADATA_V1)) + _METADATA_V1)
            answer = b""
            while len(answer) < 12:
                part = connection.recv(4096)
                if not part:
                    return False
                answer += part
        # Length, correlation id, then the brokers: one that is still fenced is not among them.
        return struct.unpack(">i", answer[8:12])[0] > 0

    def settings(self, state: dict[str, Any]) -> dict[str, str]:
        return {
            "GEO_ASSETS_KAFKA_SERVERS": f"{HOST}:{state['ports']['plaintext']}",
            "TEST_KAFKA_SASL_SERVERS": f"{HOST}:{state['ports']['sasl']}",
            "TEST_KAFKA_SASL_USERNAME": _USER,
            "TEST_KAFKA_SASL_PASSWORD": state["secrets"]["password"],
        }

    def _jars(self) -> Path:
        return self.cache / f"kafka-{_pom_version()}"

    def _run(self, *options: str) -> list[str]:
        logging = f"-Dlog4j2.configurationFile={Path(__file__).with_name('kafka_log4j2.properties')}"
        return [self._java(), *options, logging, "-cp", f"{self._jars()}/*"]

    def _java(self) -> str:
        home = os.environ.get("JAVA_HOME")
        package = "Debian and Ubuntu have it in the package openjdk-17-jre-headless, or openjdk-21-jre-headless"
        java = program("java", package, *([Path(home) / "bin"] if home else []))
        shown = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
        found = re.search(r'version "(\d+)', shown)
        if found is None or int(found[1]) < 17:
            raise MissingProgram(f"{java} is older than Java 17, which Kafka needs: {package}")
        return java

    def _fetch(self) -> None:
        """Copy the jars out of Maven once; folders share them."""
        jars = self._jars()
        self.cache.mkdir(parents=True, exist_ok=True)
        with (self.cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if jars.is_dir():
                return
            part = jars.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            copied = subprocess.run(
                [
                    program("mvn", "Debian and Ubuntu have it in the package maven"),
                    *("-q", "-B", "-f", str(_POM), "dependency:copy-dependencies"),
                    *(f"-DoutputDirectory={part}", "-DincludeScope=runtime"),
                ],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                cwd=self.cache,
            )
            if copied.returncode:
                raise NotReady("kafka: Maven could not fetch its jars", copied.stdout.strip()[-2_000:])
            part.rename(jars)

    def _format(self, password: str) -> None:
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        # An id that begins with a dash would be read as an option.
        cluster = "A" + cluster[1:]
        made = subprocess.run(
            [
                *self._run("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
                *("kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(self.folder / "server.properties")),
                *("--add-scram", f"SCRAM-SHA-512=[name={_USER},password={password}]"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            shutil.rmtree(self.data, ignore_errors=True)
            told = (made.stdout + made.stderr).replace(password, "…")
            raise NotReady("kafka: its storage could not be formatted", told.strip()[-2_000:])


def _pom_version() -> str:
    found = re.search(r"<artifactId>kafka_2\.13</artifactId>\s*<version>([^<]+)<", _POM.read_text())
    assert found is not None
    return found[1]
