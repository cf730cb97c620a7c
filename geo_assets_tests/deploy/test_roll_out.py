"""`deploy/k8s/roll-out` against a kubectl that keeps a little cluster in a folder and writes down what it was asked."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from geo_assets_tests.deploy.examples import DEPLOY
from geo_assets_tests.waiting import patient

SCRIPT = DEPLOY / "k8s/roll-out"

KUBECTL = r"""#!/usr/bin/env bash
cd "$(dirname "$0")" || exit 99
asked="$*"
printf '%s\n' "$asked" >>calls
if [ -s fails ] && [[ $asked == *"$(cat fails)"* ]]; then
    echo "error: You must be logged in to the server (Unauthorized)" >&2
    exit 1
fi
name=${asked#*deployment}
name=${name#/}
name=${name# }
name=${name%% *}
become() { if [ -e "$1.next" ]; then mv "$1.next" "$1"; fi; }
case $asked in
kustomize*) echo "rendered: $2"; if [ -e turned ]; then rm turned; else touch turned; fi ;;
*step=prepare) become configmaps && become secrets ;;
*step=serve) become deployments ;;
*"get deployments"*) cat deployments 2>/dev/null || true ;;
*"get deployment "*annotations*) cat "annotation.$name" 2>/dev/null || true ;;
*"get deployment "*secretRef*)
    # In another order each time: the real one promises none.
    if [ -e turned ]; then echo "geo-assets-postgres  geo-assets-$name "; else
        echo " geo-assets-$name geo-assets-postgres"; fi ;;
*"get deployment "*) echo "geo-assets-settings" ;;
# An absent object is an error unless it is said that it may be.
*"get configmap"*) cat configmaps 2>/dev/null || [[ $asked == *--ignore-not-found* ]] ;;
*"get secret geo-assets-"*" geo-assets-"*)
    if [ ! -e secrets ]; then [[ $asked == *--ignore-not-found* ]]; exit; fi
    read -r postgres other <secrets
    if [[ $asked == *"secret geo-assets-postgres "* ]]; then echo "$postgres $other "; else
        echo " $other $postgres"; fi ;;
*"get job migrate"*) cat job 2>/dev/null || { echo "Error: jobs.batch not found" >&2; exit 1; } ;;
*annotate*) printf '%s' "${asked##*=}" >"annotation.$name" ;;
*"rollout status"*) [ "$name" != "$(cat stuck 2>/dev/null)" ] ;;
esac
"""


@dataclass
class Cluster:
    """A folder that the fake kubectl reads and writes."""

    folder: Path

    def write(self, **files: str) -> None:
        """Set what is there; with `__next`, what is there once it is applied."""
        for name, text in files.items():
            (self.folder / name.replace("__", ".")).write_text(text)

    def roll_out(
        self, *arguments: str | Path, **environment: str
    ) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """Run the script; how it ended, and what kubectl was asked."""
        (self.folder / "calls").write_text("")
        done = subprocess.run(
            [SCRIPT, *(arguments or [self.folder / "overlay"])],
            env={**os.environ, "KUBECTL": str(self.folder / "kubectl"), "ROLL_OUT_WAIT_S": "1", **environment},
            capture_output=True, text=True, check=False, timeout=patient(60),
        )  # fmt: skip
        return done, (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """A cluster without anything, and an overlay that brings two Deployments into it."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)
    (tmp_path / "overlay").mkdir()
    (tmp_path / "overlay/kustomization.yaml").touch()
    made = Cluster(tmp_path)
    made.write(deployments__next=deployments("v1"), configmaps__next="A=1", secrets__next="101 102", job="Complete")
    return made


@pytest.fixture
def served(cluster: Cluster) -> Cluster:
    """The same after a roll-out."""
    done, _ = cluster.roll_out()
    assert done.returncode == 0, done.stderr
    return cluster


def deployments(image: str) -> str:
    """Two of them with their pods' templates, as kubectl prints both."""
    return "".join(f'{name}\t{{"spec":{{"image":"{image}","text":"a\\\\n b"}}}}\n' for name in ("edge", "tiles"))


def steps(calls: list[str]) -> list[str]:
    """What of it changes the cluster, or waits for it."""
    shown = []
    for call in calls:
        words = call.removeprefix("-n geo-assets ").split()
        if words[0] in ("apply", "delete"):
            shown.append(f"{words[0]} {words[-1] if words[0] == 'apply' else words[2]}".replace("geo-assets/step=", ""))
        if words[0] == "rollout":
            shown.append(f"{words[1]} {words[2]}")
    return shown


def restarted(calls: list[str]) -> list[str]:
    """Which Deployments were."""
    return [step.split("/")[1] for step in steps(calls) if step.startswith("restart")]


IN_ORDER = ["apply prepare", "delete migrate", "apply migrate", "apply serve"]
WAITED = ["status deployment/edge", "status deployment/tiles"]


def test_a_first_roll_out_applies_everything_in_order_and_restarts_nothing(cluster: Cluster) -> None:
    done, calls = cluster.roll_out()

    assert (done.returncode, done.stderr) == (0, "")
    assert steps(calls) == IN_ORDER + WAITED


def test_the_same_again_restarts_nothing(served: Cluster) -> None:
    done, calls = served.roll_out()

    assert (done.returncode, done.stderr) == (0, "")
    assert steps(calls) == IN_ORDER + WAITED


@pytest.mark.parametrize("changed", [{"configmaps__next": "A=2"}, {"secrets__next": "101 107"}, {"secrets": "108 102"}])
def test_a_changed_configmap_or_secret_restarts_what_reads_it_once(served: Cluster, changed: dict[str, str]) -> None:
    # The last of them was changed by hand before the roll-out, as where no overlay makes Secrets.
    served.write(**changed)
    done, calls = served.roll_out()

    assert done.returncode == 0
    assert restarted(calls) == ["edge", "tiles"]
    assert restarted(served.roll_out()[1]) == []


def test_pods_that_the_manifests_start_anew_are_not_started_twice(served: Cluster) -> None:
    edge, tiles = deployments("v1").splitlines(keepends=True)
    served.write(deployments__next=edge + tiles.replace("v1", "v2"), configmaps__next="A=2")

    assert restarted(served.roll_out()[1]) == ["edge"]
    assert restarted(served.roll_out()[1]) == []


def test_a_change_that_came_with_a_failed_migration_is_not_forgotten(served: Cluster) -> None:
    served.write(configmaps__next="A=2", job="Failed")
    assert served.roll_out()[0].returncode == 1
    served.write(job="Complete")

    assert restarted(served.roll_out()[1]) == ["edge", "tiles"]


def test_no_value_of_a_secret_is_asked_for(served: Cluster) -> None:
    _, calls = served.roll_out()
    asked = [call for call in calls if "get secret" in call]

    assert asked
    assert [call for call in asked if not call.endswith(("-o name", "-o jsonpath={..resourceVersion}"))] == []


def test_a_failed_migration_ends_it_with_a_line_and_starts_nothing(served: Cluster) -> None:
    served.write(job="Failed", deployments__next=deployments("v2"))
    done, calls = served.roll_out()

    assert done.returncode == 1
    assert done.stderr == "== the migration failed: nothing of the new version was started\n"
    assert steps(calls) == IN_ORDER[:3]


@pytest.mark.parametrize(
    ("fails", "job", "why"),
    [("get job", "", " (error: You must be logged in to the server (Unauthorized))"), ("", "", "")],
)
def test_a_migration_that_is_not_seen_to_end_is_waited_for_no_longer_than_told(
    served: Cluster, fails: str, job: str, why: str
) -> None:
    served.write(fails=fails, job=job)
    done, calls = served.roll_out()

    assert done.returncode == 1
    assert done.stderr == (
        f"== the migration was not seen to end within 1 s{why}: nothing of the new version was started\n"
    )
    assert steps(calls) == IN_ORDER[:3]


@pytest.mark.parametrize("fails", ["kustomize", "get secret", "get deployments"])
def test_where_the_cluster_cannot_be_read_nothing_is_changed(served: Cluster, fails: str) -> None:
    served.write(fails=fails)
    done, calls = served.roll_out()

    assert done.returncode == 1
    assert "Unauthorized" in done.stderr
    assert done.stderr.endswith(": nothing was changed\n")
    assert steps(calls) == []


@pytest.mark.parametrize(
    "fails",
    ["step=prepare", "delete job", "step=migrate", "step=serve", "get configmap", "secretRef", "annotate", "restart"],
)
def test_whatever_step_fails_it_ends_with_1_and_says_which(served: Cluster, fails: str) -> None:
    served.write(fails=fails, configmaps__next="A=2")
    done, _ = served.roll_out()

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("== ")


def test_a_deployment_that_does_not_get_ready_is_named_with_the_way_back(served: Cluster) -> None:
    served.write(stuck="tiles")
    done, _ = served.roll_out()

    assert done.returncode == 1
    assert done.stderr.endswith("tiles did not get ready; back: kubectl -n geo-assets rollout undo deployment/tiles\n")


def test_kubectl_may_be_a_program_with_arguments(cluster: Cluster) -> None:
    done, calls = cluster.roll_out(KUBECTL=f"{cluster.folder / 'kubectl'} --context test")

    assert done.returncode == 0
    assert {call.split(" -n ")[0].split(" kustomize")[0].split(" apply")[0] for call in calls} == {"--context test"}


@pytest.mark.parametrize(
    ("arguments", "environment", "told"),
    [
        ([], {}, "OVERLAY is missing"),
        ([""], {}, "OVERLAY is empty"),
        (["nowhere"], {}, "OVERLAY is 'nowhere': expected a folder with a kustomization.yaml"),
        (["--hlep"], {}, "OVERLAY is '--hlep'"),
        ([".", "more"], {}, "'more' is one argument too many"),
        (["."], {"KUBECTL": "not-here"}, "KUBECTL is 'not-here': expected a program"),
        (["."], {"KUBECTL": " "}, "KUBECTL is ' ': expected a program"),
        *((["."], {"ROLL_OUT_WAIT_S": wait}, f"ROLL_OUT_WAIT_S is '{wait}': expected a whole number of seconds")
          for wait in ("0", "-1", "1.5", "010", "5m", "a[$(id)]")),
    ],
)  # fmt: skip
def test_what_it_is_told_is_checked_before_anything_else(
    cluster: Cluster, arguments: list[str], environment: dict[str, str], told: str
) -> None:
    overlay = str(cluster.folder / "overlay")
    (cluster.folder / "calls").write_text("")
    done = subprocess.run(
        [SCRIPT, *(overlay if each == "." else each for each in arguments)],
        env={**os.environ, "KUBECTL": str(cluster.folder / "kubectl"), **environment},
        capture_output=True, text=True, check=False, timeout=patient(60),
    )  # fmt: skip

    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert done.stderr.startswith(f"roll-out: {told}")
    assert (cluster.folder / "calls").read_text() == ""


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_on_stdout_and_asks_nothing_of_a_cluster(cluster: Cluster, flag: str) -> None:
    done, calls = cluster.roll_out(flag, KUBECTL="not-here")

    assert (done.returncode, done.stderr, calls) == (0, "", [])
    assert done.stdout.startswith("usage: deploy/k8s/roll-out OVERLAY\n")
