"""The images as they are built and run: as nobody in particular, on a root that is read-only, with no secret inside.

Needs root, buildah and runc; `make test-k8s` runs it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from geo_assets_tests.deploy.examples import DEPLOY
from geo_assets_tests.needs import missing
from geo_assets_tests.waiting import patient

pytestmark = pytest.mark.k8s

ROOT = DEPLOY.parent
CACHE = Path(
    os.environ.get("GEO_ASSETS_LAB_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "geo_assets" / "lab"
)
NAMES = {"platform": "geo-assets", "edge": "geo-assets-edge", "tileserver": "geo-assets-tileserver"}
NEEDLE = "needle-b1946ac92492d2347c6235b4"


def buildah(*arguments: str) -> str:
    storage = ("--root", str(CACHE / "image/storage"), "--runroot", str(CACHE / "image/run"))
    done = subprocess.run(
        ["buildah", *storage, "--storage-driver", "overlay", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def build(checkout: Path, *targets: str, **environment: str) -> dict[str, str]:
    """Name to digest of what was built."""
    done = subprocess.run(
        [checkout / "deploy/image/build", *targets],
        capture_output=True, text=True, check=False, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()}


@dataclass(frozen=True)
class Image:
    """A built image, mounted."""

    root: Path
    config: dict[str, Any]

    def run(self, *command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command as a pod of the manifests would: no capability, root read-only, /tmp and /data writable."""
        name = f"image-{uuid.uuid4().hex[:12]}"
        bundle = folder / name
        bundle.mkdir()
        subprocess.run(["runc", "spec"], cwd=bundle, check=True)
        spec = json.loads((bundle / "config.json").read_text())
        user, _, group = self.config["User"].partition(":")
        spec["root"] = {"path": str(self.root), "readonly": True}
        spec["process"] |= {
            "terminal": False,
            "user": {"uid": int(user), "gid": int(group)},
            "args": list(command),
            "cwd": self.config["WorkingDir"],
            "env": [*self.config["Env"], *(f"{key}={value}" for key, value in environment.items())],
            "capabilities": {},
            "noNewPrivileges": True,
        }
        # As an emptyDir with the pod's fsGroup.
        options = ["nosuid", "nodev", "mode=1777", f"uid={user}", f"gid={group}"]
        spec["mounts"] += [
            {"destination": place, "type": "tmpfs", "source": "tmpfs", "options": options}
            for place in ("/tmp", "/data")
        ]
        (bundle / "config.json").write_text(json.dumps(spec))
        return subprocess.run(
            ["runc", "--root", str(folder / "runc"), "run", "--bundle", str(bundle), name],
            capture_output=True, text=True, timeout=patient(300), check=False,
        )  # fmt: skip


@pytest.fixture(scope="session")
def images() -> Iterator[dict[str, Image]]:
    if os.geteuid() != 0:
        missing("building an image needs root")
    for program in ("buildah", "runc"):
        if shutil.which(program) is None:
            missing(f"{program} is not installed: apt-get install {program}")
    build(ROOT)
    containers = {target: buildah("from", "--pull-never", f"localhost/{name}:lab") for target, name in NAMES.items()}
    yield {
        target: Image(
            Path(buildah("mount", container)),
            json.loads(buildah("inspect", "--type", "image", f"localhost/{NAMES[target]}:lab"))["OCIv1"]["config"],
        )
        for target, container in containers.items()
    }
    for container in containers.values():
        buildah("rm", container)


@pytest.mark.parametrize(
    ("target", "command"),
    [
        *(
            ("platform", ("geo-assets", role, "--help"))
            for role in ("edge", "ingest", "live", "tiles", "migrate", "mend")
        ),
        *(("platform", (program, "--help")) for program in ("dagster", "dagster-webserver", "dagster-daemon")),
        ("platform", ("dagster", "api", "grpc", "--help")),
        ("edge", ("geo-assets", "edge", "--help")),
        ("tileserver", ("geo-assets", "tiles", "--help")),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_each_role_starts_as_nobody_on_a_root_that_is_read_only(
    images: dict[str, Image], target: str, command: tuple[str, ...], tmp_path: Path
) -> None:
    said = images[target].run(*command, folder=tmp_path)

    assert said.returncode == 0, said.stderr
    assert "Usage" in said.stdout or "usage" in said.stdout


def test_doctor_finds_the_locked_libraries_in_the_image(images: dict[str, Image], tmp_path: Path) -> None:
    said = images["platform"].run("geo-assets", "doctor", folder=tmp_path)
    (line,) = [line for line in said.stdout.splitlines() if "GEOS and PROJ" in line]

    assert "ok" in line, line
    assert "as native.lock has them" in line
    assert images["platform"].run("python", "-m", "geo_assets.services.native", folder=tmp_path).returncode == 0


def test_the_image_refuses_a_grid_that_is_not_locked(images: dict[str, Image], tmp_path: Path) -> None:
    start = "open('/tmp/a.tif', 'w').close(); from geo_assets.cli import main; main()"
    said = images["platform"].run(
        "python", "-c", start, "ingest", folder=tmp_path, PROJ_USER_WRITABLE_DIRECTORY="/tmp"
    )  # fmt: skip

    assert said.returncode == 1
    assert "grid a.tif is 0 bytes, native.lock says none" in said.stderr


def test_the_code_location_loads_in_the_image(images: dict[str, Image], tmp_path: Path) -> None:
    code = "from geo_assets.definitions import defs; print(len(list(defs.resolve_all_job_defs())))"
    said = images["platform"].run("python", "-c", code, folder=tmp_path)

    assert said.returncode == 0, said.stderr
    assert int(said.stdout.splitlines()[-1]) > 5


@pytest.mark.parametrize("target", ["edge", "tileserver"])
def test_a_slim_image_has_neither_dagster_nor_a_geometry_library(
    images: dict[str, Image], target: str, tmp_path: Path
) -> None:
    code = """
import importlib.util as u
print([n for n in ("dagster", "shapely", "numpy", "pyproj", "pyarrow", "pip", "uv") if u.find_spec(n)])
"""
    said = images[target].run("python", "-c", code, folder=tmp_path)

    assert said.stdout == "[]\n", said.stderr


def test_the_map_page_is_where_it_is_served_and_nowhere_else(images: dict[str, Image], tmp_path: Path) -> None:
    code = "from geo_assets.services.tileserver.static import StaticFiles; print(StaticFiles().has_vendor)"
    for target in ("platform", "tileserver"):
        said = images[target].run("python", "-c", code, folder=tmp_path)
        assert said.stdout == "True\n", said.stderr
    assert not list((images["edge"].root / "opt/app").rglob("maplibre*"))
    assert list((images["tileserver"].root / "opt/app").rglob("maplibre*"))


def test_only_locked_versions_are_in_the_images(images: dict[str, Image], tmp_path: Path) -> None:
    code = "import importlib.metadata as m; print(*sorted(f'{d.name}=={d.version}'.lower() for d in m.distributions()))"
    lock = {line.split(" ;")[0].split(";")[0].strip().lower().replace("_", "-").replace(".", "-")
            for line in (ROOT / "requirements.lock").read_text().splitlines()}  # fmt: skip
    for image in images.values():
        found = image.run("/opt/app/bin/python", "-I", "-c", code, folder=tmp_path).stdout.split()
        unlocked = {each for each in found if each.replace("_", "-").replace(".", "-") not in lock}
        assert {each.partition("==")[0] for each in unlocked} <= {"geo-assets", "geo_assets"}
        assert len(found) > 40


def test_the_image_says_what_it_is_and_what_stops_it(images: dict[str, Image]) -> None:
    for image in images.values():
        labels = image.config["Labels"]
        assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
        assert labels["org.opencontainers.image.revision"] not in ("", "unknown")
        assert image.config["StopSignal"] == "SIGTERM"
        assert image.config["User"] == "10001:10001"
        assert not image.config.get("Entrypoint")


def test_a_secret_that_lies_about_gets_into_no_layer(images: dict[str, Image], tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for name in subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines():  # fmt: skip
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, checkout / name)
    for name in (
        ".env",
        "deploy/secrets.env",
        "geo_assets/.env",
        "geo_assets/prod.env",
        "resources/client.pem",
        "x.txt",
    ):
        (checkout / name).write_text(f"PASSWORD={NEEDLE}\n")

    build(checkout, "edge", GEO_ASSETS_IMAGE_TAG="planted", GEO_ASSETS_POSTGRES_URL=f"postgresql://u:{NEEDLE}@db/x")
    layers = tmp_path / "layers"
    try:
        buildah("push", "--disable-compression", "localhost/geo-assets-edge:planted", f"dir:{layers}")
    finally:
        buildah("rmi", "localhost/geo-assets-edge:planted")

    files = list(layers.iterdir())
    assert len(files) > 5
    assert not [file.name for file in files if NEEDLE.encode() in file.read_bytes()]
