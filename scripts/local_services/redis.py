"""Redis with a password and an append-only file."""

from __future__ import annotations

import socket
from typing import Any

from scripts.local_services.service import HOST, Service, program, write_private


class Redis(Service):
    """One server, as production has it: everything it knows is on disk within a second."""

    name = "redis"
    ports = ("redis",)
    secrets = ("password",)

    def check_programs(self) -> None:
        self._server()

    def prepare(self, state: dict[str, Any]) -> None:
        self.data.mkdir(exist_ok=True)
        lines = [
            f"bind {HOST}",
            f"port {state['ports']['redis']}",
            f"requirepass {state['secrets']['password']}",
            f'dir "{self.data}"',
            "daemonize no",
            "appendonly yes",
            "appendfsync everysec",
            'save ""',
        ]
        write_private(self.folder / "redis.conf", "\n".join(lines) + "\n")

    def command(self, state: dict[str, Any]) -> list[str]:
        return [self._server(), str(self.folder / "redis.conf")]

    def answers(self, state: dict[str, Any]) -> bool:
        with socket.create_connection((HOST, state["ports"]["redis"]), timeout=2) as connection:
            connection.sendall(f"AUTH {state['secrets']['password']}\r\nPING\r\n".encode())
            answer = b""
            while answer.count(b"\r\n") < 2:
                part = connection.recv(1024)
                if not part:
                    return False
                answer += part
        return answer == b"+OK\r\n+PONG\r\n"

    def settings(self, state: dict[str, Any]) -> dict[str, str]:
        return {"GEO_ASSETS_REDIS_URL": f"redis://:{state['secrets']['password']}@{HOST}:{state['ports']['redis']}/0"}

    def _server(self) -> str:
        return program("redis-server", "Debian and Ubuntu have it in the package redis-server")
