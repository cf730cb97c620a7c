"""Files of the map page and what npm put beside them, by an explicit list: no path of a request is ever opened."""

from __future__ import annotations

import gzip
import hashlib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

WEB: Final = Path(__file__).resolve().parent.parent / "web"
INSTALL: Final = "npm ci --prefix geo_assets/services/web"
"""What puts the map library in its place."""

_HTML, _JS, _CSS, _SVG = (
    "text/html; charset=utf-8",
    "text/javascript; charset=utf-8",
    "text/css; charset=utf-8",
    "image/svg+xml",
)
_MAPLIBRE = "node_modules/maplibre-gl/dist/"

PAGE: Final = {
    "/": ("index.html", _HTML),
    "/map.js": ("map.js", _JS),
    "/live-tiles.js": ("live-tiles.js", _JS),
    **{
        f"/{name}.js": (f"{name}.js", _JS)
        for name in (
            "dom",
            "geofences",
            "fences",
            "devices",
            "triggers",
            "draw",
            "live",
            "heat",
        )
    },
    "/map.css": ("map.css", _CSS),
    "/favicon.svg": ("favicon.svg", _SVG),
}
"""URL path to file and media type: the project's own."""

VENDOR: Final = {
    "/vendor/maplibre-gl.mjs": (_MAPLIBRE + "maplibre-gl.mjs", _JS),
    "/vendor/maplibre-gl-worker.mjs": (_MAPLIBRE + "maplibre-gl-worker.mjs", _JS),
    "/vendor/maplibre-gl.css": (_MAPLIBRE + "maplibre-gl.css", _CSS),
    "/vendor/terra-draw.js": ("node_modules/terra-draw/dist/terra-draw.umd.js", _JS),
    "/vendor/terra-draw-maplibre.js": (
        "node_modules/terra-draw-maplibre-gl-adapter/dist/terra-draw-maplibre-gl-adapter.umd.js",
        _JS,
    ),
}
"""URL path to file and media type: from npm, absent where it did not run."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file ready to be sent, as it is and compressed."""

    body: bytes
    zipped: bytes
    etag: str
    media_type: str


class StaticFiles:
    """The listed files, read when first asked for and again when they changed on disk. Safe from many threads."""

    def __init__(self, root: Path = WEB) -> None:
        self._root = root
        self._files: dict[str, tuple[tuple[int, int], StaticFile]] = {}
        self._lock = threading.Lock()

    @property
    def has_vendor(self) -> bool:
        """Whether every file of npm is there."""
        return all((self._root / name).is_file() for name, _ in VENDOR.values())

    def get(self, path: str) -> StaticFile | None:
        """The file of a listed URL path; None when it is not on disk."""
        name, media_type = PAGE.get(path) or VENDOR[path]
        file = self._root / name
        try:
            info = file.stat()
        except OSError:
            return None
        stamp = (info.st_mtime_ns, info.st_size)
        with self._lock:
            kept = self._files.get(path)
            if kept is not None and kept[0] == stamp:
                return kept[1]
            body = file.read_bytes()
            etag = f'W/"{hashlib.sha256(body).hexdigest()[:32]}"'
            result = StaticFile(body, gzip.compress(body, 6, mtime=0), etag, media_type)
            self._files[path] = (stamp, result)
            return result
