"""Of what npm brought, what the image keeps: the files that the tile server serves, and every package's licence."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path


def keep(web: Path, root: Path) -> None:
    """Copy those files to where the installed package expects them.

    Args:
        web: Has `node_modules`, and the tile server's `static.py`, whose list decides.
        root: Becomes part of a virtual environment: its `lib/pythonX.Y/site-packages`.
    """
    sys.path.insert(0, str(web))
    from static import VENDOR  # pyright: ignore[reportMissingImports]

    python = f"python{sysconfig.get_python_version()}"
    target = root / "lib" / python / "site-packages" / "geo_assets" / "services" / "web"
    kept = [web / name for name, _ in VENDOR.values()]
    for package in (web / "node_modules").rglob("package.json"):
        kept += [package, *(file for file in package.parent.iterdir() if file.name.lower().startswith("licen"))]
    for file in kept:
        if file.is_file():
            (target / file.relative_to(web)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / file.relative_to(web))
    missing = [name for name, _ in VENDOR.values() if not (target / name).is_file()]
    if missing:
        sys.exit(f"npm did not bring {', '.join(missing)}")


if __name__ == "__main__":
    keep(Path(sys.argv[1]), Path(sys.argv[2]))
