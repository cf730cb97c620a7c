"""A release that goes back: its recipe is what it was, and so are work keys and bytes; revisions never are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from geo_assets.services import recipe
from geo_assets_tests.world import LAYERS, World, feature


def other_encoder(home: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """An image whose encoder is another one, of the same bytes."""
    monkeypatch.setattr(recipe, "ENCODER_VERSION", version)
    recipe._recipe_of.cache_clear()  # pyright: ignore[reportPrivateUsage]


def other_grid(home: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """An image whose tiles have a finer grid: other bytes."""
    extent = {"old": 4096, "new": 8192}[version]
    (home / "layers.yaml").write_text(f"extent: {extent}\n{LAYERS}")


@pytest.mark.parametrize(("release", "changes_bytes"), [(other_encoder, False), (other_grid, True)])
def test_an_image_that_goes_back_builds_what_the_new_one_touched_and_skips_the_rest(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    release: Callable[[Path, pytest.MonkeyPatch, str], None],
    changes_bytes: bool,
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    release(home, monkeypatch, "old")
    old = World(home)
    old.edit(feature(1))
    old.mark_hints()
    old.build_dirty()
    before = {key: state for key, state in old.published().items() if state.content_hash}
    touched = sorted(before)[0]
    old.close()

    release(home, monkeypatch, "new")
    new = World(home)
    new.stack.ledger.mark([touched])
    (result,) = new.build_dirty()
    assert result.outcome == ("built" if changes_bytes else "unchanged")
    assert result.work_key != before[touched].work_key
    new.close()

    release(home, monkeypatch, "old")
    back = World(home)
    back.stack.ledger.mark(sorted(before))
    outcomes = {result.key: result.outcome for result in back.build_dirty()}
    after = back.published()

    assert outcomes == {
        key: ("built" if changes_bytes else "unchanged") if key == touched else "skipped" for key in before
    }
    for key, state in before.items():
        assert (after[key].work_key, after[key].content_hash) == (state.work_key, state.content_hash)
        assert after[key].revision == state.revision + (2 if changes_bytes and key == touched else 0)
    back.close()
    recipe._recipe_of.cache_clear()  # pyright: ignore[reportPrivateUsage]
