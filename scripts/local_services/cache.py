"""An HTTP cache in front of the tile server: Varnish, which keeps what the origin allows and forgets what is purged."""

from __future__ import annotations

import socket
from typing import Any

from scripts.local_services.faults import ServiceFault
from scripts.local_services.service import CHECKOUT, HOST, Service, program, write_private

_RULES = CHECKOUT / "deploy" / "varnish" / "rules.vcl"
_VCL = """\
vcl 4.1;

backend origin {
    .host = "%(host)s";
    .port = "%(port)s";
    .connect_timeout = 2s;
}

acl purgers {
    "127.0.0.1";
    "::1";
}

include "%(rules)s";
"""


class Cache(Service):
    """Varnish with PURGE; a purge forgets every variant of a path."""

    name = "cache"
    ports = ("http",)
    start_seconds = 30.0

    def check_programs(self) -> None:
        self._server()

    def prepare(self, state: dict[str, Any]) -> None:
        backend = state["options"].get("backend", "")
        host, _, port = backend.rpartition(":")
        if not host or not port.isdigit():
            raise ServiceFault(f"cache: --backend is {backend!r}; it must be HOST:PORT of the tile server")
        write_private(self.folder / "cache.vcl", _VCL % {"host": host.strip("[]"), "port": port, "rules": _RULES})

    def command(self, state: dict[str, Any]) -> list[str]:
        return [
            self._server(),
            *("-F", "-j", "none", "-n", str(self.folder / "work"), "-f", str(self.folder / "cache.vcl")),
            *("-a", f"{HOST}:{state['ports']['http']}", "-T", "none", "-s", "malloc,64m"),
            # Without Cache-Control nothing is kept.
            *("-p", "default_ttl=0", "-p", "default_grace=0", "-p", "default_keep=0"),
            *("-p", "thread_pools=1", "-p", "thread_pool_min=10"),
        ]

    def answers(self, state: dict[str, Any]) -> bool:
        # A purge is answered by the cache itself: the origin need not be there yet.
        with socket.create_connection((HOST, state["ports"]["http"]), timeout=2) as connection:
            connection.settimeout(5)
            connection.sendall(b"PURGE /services-ready HTTP/1.1\r\nHost: cache\r\nConnection: close\r\n\r\n")
            return connection.recv(64).startswith(b"HTTP/1.1 200")

    def settings(self, state: dict[str, Any]) -> dict[str, str]:
        return {"GEO_ASSETS_PURGE_URLS": f"http://{HOST}:{state['ports']['http']}"}

    def _server(self) -> str:
        return program("varnishd", "Debian and Ubuntu have it in the package varnish")
