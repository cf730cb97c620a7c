"""How large a run's pod is: by its batch, within bounds, never less for more; and the tag that says so."""

from __future__ import annotations

import json

from dagster_k8s.job import get_user_defined_k8s_config
from hypothesis import given
from hypothesis import strategies as st

from geo_assets.kubernetes.pods import CONFIG_TAG, MAIN_MB, STEP_MB, WORKER_MB, Load, Size, run_tags, size_of

LOADS = st.builds(Load, st.integers(0, 20_000), st.integers(0, 10**9), st.integers(0, 50_000_000))
WORKERS, MEASURED, MOST = st.integers(1, 16), st.sampled_from([0, 64, 256, 512, 2_048]), st.integers(1_024, 65_536)


@given(LOADS, WORKERS, MEASURED, MOST)
def test_a_pod_is_within_bounds_and_has_room_for_the_run_or_gets_the_most(
    load: Load, workers: int, measured: int, most: int
) -> None:
    size = size_of(load, workers=workers, worker_megabytes=measured, most_megabytes=most)

    assert MAIN_MB + WORKER_MB <= size.megabytes <= most
    if size.megabytes < most:
        assert size.megabytes % STEP_MB == 0
        # Every worker has what workers were measured to need, and one of them the heaviest tile.
        assert size.megabytes >= MAIN_MB + workers * measured
        assert size.megabytes * 1_000_000 >= load.heaviest * 600
    assert 0 < size.millicores <= 250 + workers * 500


@given(LOADS, LOADS, WORKERS, MEASURED, MOST)
def test_more_to_build_never_gives_a_smaller_pod(one: Load, more: Load, workers: int, measured: int, most: int) -> None:
    larger = Load(one.tiles + more.tiles, one.vertices + more.vertices, max(one.heaviest, more.heaviest))
    sizes = [size_of(load, workers=workers, worker_megabytes=measured, most_megabytes=most) for load in (one, larger)]

    assert sizes[0].megabytes <= sizes[1].megabytes
    assert sizes[0].millicores <= sizes[1].millicores


def test_an_edit_gets_a_small_pod_and_a_country_at_a_low_zoom_a_large_one() -> None:
    edit = size_of(Load(20, 60_000, 8_000), workers=2, worker_megabytes=0, most_megabytes=8_192)
    country = size_of(Load(1, 5_000_000, 5_000_000), workers=2, worker_megabytes=0, most_megabytes=8_192)

    assert edit == Size(1_280, 750)
    assert country.megabytes == 6_144


@given(
    st.one_of(st.none(), st.builds(Size, st.integers(1, 65_536), st.integers(1, 64_000))),
    st.sampled_from([None, "run"]),
)
def test_the_launcher_reads_from_the_tag_what_was_meant_and_nothing_else(
    size: Size | None, account: str | None
) -> None:
    tags = run_tags(size, account)

    asked = get_user_defined_k8s_config(tags)
    resources = asked.container_config.get("resources", {})
    assert set(asked.container_config) <= {"resources"}
    assert set(asked.pod_spec_config) <= {"service_account_name"}
    assert asked.pod_spec_config.get("service_account_name") == account
    if size is None:
        assert resources == {}
    else:
        assert resources["limits"] == {"memory": f"{size.megabytes}Mi"}
        assert resources["requests"] == {"memory": f"{size.megabytes}Mi", "cpu": f"{size.millicores}m"}


def test_where_runs_are_no_pods_no_tag_is_given() -> None:
    assert run_tags(None) == {}
    assert json.loads(run_tags(None, "run")[CONFIG_TAG]) == {"pod_spec_config": {"service_account_name": "run"}}
