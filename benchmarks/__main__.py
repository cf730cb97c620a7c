"""All benchmarks, one after the other, each in a process of its own: `python -m benchmarks [--quick] [--json FILE]`."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import benchmarks
from benchmarks.report import parser

SHARED = {"__main__", "both_stacks", "city_home", "report", "sampler", "synthetic"}
"""Modules that are no benchmark."""


def main() -> int:
    command = parser(__doc__ or "")
    command.add_argument("names", nargs="*", metavar="NAME", help="which of them; all when none is named")
    arguments = command.parse_args()
    names = sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name not in SHARED)
    unknown = sorted(set(arguments.names) - set(names))
    if unknown:
        command.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(names)}")
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.names or names:
            file = Path(folder, f"{name}.json")
            options = ["--json", str(file), *(["--quick"] if arguments.quick else [])]
            if subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *options], check=False).returncode:
                failed.append(name)
            if file.exists():
                rows += [{**row, "name": f"{name}: {row['name']}"} for row in json.loads(file.read_text("utf-8"))]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
