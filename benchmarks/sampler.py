"""A profile of a service from the inside, for benchmarks: what its threads were doing, weighed by the time they took.

`environment` makes a Python process sample itself (a `sitecustomize` of its own starts it before the program), without
a line in the program. 200 samples a second: for each thread where it stood, and the CPU time it took since the last.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

EVERY_S = 0.005
FOLDER = "BENCH_PROFILE"
"""Environment variable: where processes leave their profiles."""
OURS = ("geo_assets/", "resources/")
NAMES = ("edge", "ingest", "tiles", "live")
"""Services that are sampled, by the last word of their command line."""

MEASURING = "measuring"
"""While a file of this name is in the folder, samples count: what a service does to start is no part of the profile."""

_SITE = "import benchmarks.sampler as sampler\nsampler.start()\n"


def environment(folder: Path) -> dict[str, str]:
    """Variables for a process whose services are to leave profiles in the folder."""
    site = folder / "site"
    site.mkdir(parents=True, exist_ok=True)
    (site / "sitecustomize.py").write_text(_SITE)
    root = Path(__file__).parents[1]
    return {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join((str(site), str(root)))}


def start() -> None:
    """Sample this process if it is a service; called before its program begins."""
    folder = os.environ.get(FOLDER)
    # Not known yet as `sys.argv`: that is set when the program is found.
    words = sys.orig_argv
    if folder and words[-1] in NAMES and "geo_assets.cli" in words:
        _Sampler(words[-1], Path(folder)).start()


class _Sampler(threading.Thread):
    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(daemon=True, name="sampler")
        self._service, self._folder = name, folder
        self._cpu: Counter[tuple[str, ...]] = Counter()
        self._wall: Counter[tuple[str, ...]] = Counter()
        self._seconds = 0.0
        atexit.register(self.dump)

    def run(self) -> None:
        spent: dict[int, float] = {}
        own = threading.get_ident()
        main = threading.main_thread().ident
        began = time.perf_counter()
        while True:
            time.sleep(EVERY_S)
            counts = (self._folder / MEASURING).exists()
            before, began = began, time.perf_counter()
            self._seconds += began - before if counts else 0.0
            for thread, frame in sys._current_frames().items():
                if thread == own:
                    continue
                try:
                    now = time.clock_gettime(time.pthread_getcpuclockid(thread))
                except OSError:
                    continue
                took = now - spent.get(thread, now)
                spent[thread] = now
                if not counts:
                    continue
                stack = _stack(frame)
                if took > 0:
                    self._cpu[stack] += round(took * 1_000_000)
                if thread == main:
                    self._wall[stack] += 1

    def dump(self) -> None:
        """Write what was seen."""
        seen = {
            "service": self._service,
            "seconds": self._seconds,
            "cpu_us": [[list(stack), us] for stack, us in self._cpu.copy().items()],
            "wall": [[list(stack), count] for stack, count in self._wall.copy().items()],
        }
        (self._folder / f"{self._service}-{os.getpid()}.json").write_text(json.dumps(seen))


def _stack(frame: FrameType | None) -> tuple[str, ...]:
    """Functions from the outermost to the innermost, with the line where the innermost stands."""
    names: list[str] = []
    while frame is not None:
        code = frame.f_code
        line = f":{frame.f_lineno}" if not names else ""
        names.append(f"{_short(code.co_filename)} {code.co_name}{line}")
        frame = frame.f_back
    return tuple(reversed(names))


def _short(path: str) -> str:
    for mark in ("/site-packages/", "/lib/python"):
        if mark in path:
            return path.rpartition(mark)[2]
    return path.removeprefix(str(Path(__file__).parents[1]) + "/")


@dataclass(frozen=True, slots=True)
class Profile:
    """One service's profile."""

    service: str
    seconds: float
    cpu_us: list[tuple[list[str], int]]
    wall: list[tuple[list[str], int]]

    def lines(self, most: int = 14) -> list[str]:
        """The functions that took the most CPU, with all they called and alone, and where the main thread stood."""
        total = sum(us for _, us in self.cpu_us) or 1
        whole: Counter[str] = Counter()
        alone: Counter[str] = Counter()
        for stack, us in self.cpu_us:
            for name in {one.partition(":")[0] for one in stack if one.startswith(OURS)}:
                whole[name] += us
            alone[stack[-1]] += us
        stood: Counter[str] = Counter()
        for stack, count in self.wall:
            ours = [name for name in stack if name.startswith(OURS)]
            stood[f"{ours[-1] if ours else stack[0]} > {stack[-1]}"] += count
        samples = sum(stood.values()) or 1
        return [
            f"{self.service}: {total / 1e6:.1f} s of CPU in {self.seconds:.0f} s",
            "  with what it called, % of the CPU:",
            *(f"    {100 * us / total:5.1f}  {name}" for name, us in whole.most_common(most + 6) if us < 0.9 * total),
            "  alone, % of the CPU:",
            *(f"    {100 * us / total:5.1f}  {name}" for name, us in alone.most_common(most)),
            "  where its main thread stood, % of the time:",
            *(f"    {100 * count / samples:5.1f}  {name}" for name, count in stood.most_common(most)),
        ]


def profiles(folder: Path) -> list[Profile]:
    """What processes have left in the folder."""
    found: list[Profile] = []
    for path in sorted(folder.glob("*.json")):
        read = json.loads(path.read_text())
        found.append(Profile(read["service"], read["seconds"], read["cpu_us"], read["wall"]))
    return found
