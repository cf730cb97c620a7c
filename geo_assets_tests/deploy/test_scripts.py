"""What deploy's scripts make of their arguments and of a file system that is not as they need it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from geo_assets_tests.deploy.examples import DEPLOY
from geo_assets_tests.deploy.manifests import copy_with_secrets

SCRIPTS = ("make-secrets", "k8s/overlays/local/make-secrets", "k8s/generate")
MAKERS = SCRIPTS[:2]


@pytest.fixture
def deploy(tmp_path: Path) -> Path:
    """A copy of deploy/ in which nothing is generated or made anew unless a test asks."""
    folder = tmp_path / "checkout/deploy"
    copy_with_secrets(folder)
    (folder.parent / "geo_assets/sample").mkdir(parents=True)
    (folder.parent / "geo_assets/sample/layers.yaml").write_text(
        (DEPLOY / "k8s/base/files/layers.yaml").read_text() + "# edited\n"
    )
    return folder


def run(script: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run it; what it said."""
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)], capture_output=True, text=True, check=False
    )


def files(folder: Path) -> dict[Path, bytes]:
    """All that is there, with its content."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_it_is_for_and_writes_nothing(deploy: Path, script: str) -> None:
    before = files(deploy)
    done = run(deploy / script, "--help")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")
    assert files(deploy) == before


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        *((maker, arguments) for maker in MAKERS for arguments in (["new", "more"], ["--hlep"])),
        *(("k8s/generate", [argument]) for argument in ("--chek", "--che", "check", "")),
    ],
)
def test_an_argument_that_it_does_not_know_is_refused_and_nothing_written(
    deploy: Path, script: str, arguments: list[str]
) -> None:
    before = files(deploy)
    done = run(deploy / script, *arguments)

    assert (done.returncode, done.stdout) == (2, "")
    assert f"unrecognized arguments: {arguments[-1]}" in done.stderr
    assert files(deploy) == before


def test_secrets_are_not_made_in_a_folder_that_is_not_there(deploy: Path, tmp_path: Path) -> None:
    done = run(deploy / "make-secrets", tmp_path / "nowhere/secrets.env")

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{tmp_path / 'nowhere/secrets.env'} could not be written: No such file or directory\n"


@pytest.mark.parametrize("maker", MAKERS)
def test_a_file_where_a_folder_is_needed_is_one_line(deploy: Path, tmp_path: Path, maker: str) -> None:
    (tmp_path / "file").touch()
    done = run(deploy / maker, tmp_path / "file/secrets")

    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert done.stderr.endswith(": Not a directory\n")


@pytest.mark.parametrize("maker", MAKERS)
def test_what_is_in_the_way_stays(deploy: Path, tmp_path: Path, maker: str) -> None:
    (tmp_path / "file").write_text("mine")
    done = run(deploy / maker, tmp_path / "file")

    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert (tmp_path / "file").read_text() == "mine"


def test_who_edits_what_is_generated_is_told_where_to_edit_instead(deploy: Path) -> None:
    settings = deploy / "k8s/overlays/aws/settings.env"
    assert settings.read_text().splitlines()[0].endswith("from deploy/settings/aws.env: edit that.")
    settings.write_text(settings.read_text() + "GEO_ASSETS_LOG_PARTITIONS=7\n")
    before = files(deploy)

    checked = run(deploy / "k8s/generate", "--check")
    assert files(deploy) == before
    written = run(deploy / "k8s/generate")

    assert (checked.returncode, written.returncode) == (1, 0)
    paths = ["deploy/k8s/overlays/aws/settings.env", "deploy/k8s/base/files/layers.yaml"]
    assert checked.stdout.split() == paths
    assert [line.split()[0] for line in written.stdout.splitlines()] == paths
    for said in (checked.stderr, written.stdout):
        assert "deploy/settings/aws.env says: edit that one" in said
    assert written.stderr == ""
    assert run(deploy / "k8s/generate", "--check").returncode == 0
