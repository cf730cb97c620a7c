"""A rolling update of everything while edits come in: nothing is lost, and the map is there throughout."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import httpx
import mercantile
import pytest

from geo_assets.services.status import snapshot
from geo_assets.tiles.decode import decode
from geo_assets.tiles.tile import Tile
from geo_assets_tests.k8s.asking import square, tiles_of
from geo_assets_tests.k8s.deployed import DEPLOYMENTS, NAMESPACE, Cluster
from geo_assets_tests.waiting import patient

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(900)]

EDITS, BUILDINGS = 500, 25
PAUSE_S = 0.15
"""Between edits: all of them take about as long as the roll-out."""

WEST, SOUTH = 24.71, 60.31

LATEST = """
query($partition: String!) {
  assetNodeOrError(assetKey: {path: ["tiles"]}) {
    ... on AssetNode {
      assetMaterializations(partitions: [$partition], limit: 1) {
        metadataEntries { label ... on TextMetadataEntry { text } ... on IntMetadataEntry { intValue } }
      }
    }
  }
}
"""


def building(which: int, number: int) -> dict[str, Any]:
    """A building as its edit of this number leaves it: it wanders, and its name is the number."""
    lon = WEST + 0.004 * (which % 5) + 0.00002 * (number // BUILDINGS)
    made = square(f"rolled-{which}", lon, SOUTH + 0.002 * (which // 5))
    return made | {"properties": {"name": f"edit {number}"}}


class Editor(threading.Thread):
    """Posts the edits, each until the edge has taken it; any answer but "later" ends it."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self._cluster = cluster
        self.last: dict[int, dict[str, Any]] = {}
        self.again = 0
        self.fault: str | None = None
        self.start()

    def run(self) -> None:
        for number in range(EDITS):
            which = number % BUILDINGS
            edit = building(which, number)
            while not self._taken(edit):
                self.again += 1
                time.sleep(0.2)
            if self.fault:
                return
            self.last[which] = edit
            time.sleep(PAUSE_S)

    def _taken(self, edit: dict[str, Any]) -> bool:
        try:
            answer = self._cluster.post(edit)
        except httpx.TransportError:
            return False
        if answer.status_code not in (202, 503):
            self.fault = f"{answer.status_code}: {answer.text}"
        return answer.status_code != 503


class Viewer(threading.Thread):
    """Asks for tiles all the time, with a connection for each, and counts what it gets."""

    def __init__(self, url: str, tiles: list[Tile]) -> None:
        super().__init__(daemon=True)
        self.answers: Counter[str] = Counter()
        self._urls = [f"{url}/tiles/{tile.path}.mvt" for tile in tiles]
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        number = 0
        while not self._ended.wait(0.05):
            url = self._urls[number % len(self._urls)]
            number += 1
            try:
                self.answers[str(httpx.get(url, trust_env=False, timeout=patient(30)).status_code)] += 1
            except httpx.TransportError as fault:
                self.answers[type(fault).__name__] += 1

    def end(self) -> Counter[str]:
        self._ended.set()
        self.join(patient(60))
        return self.answers


def test_a_roll_out_of_everything_during_edits_loses_nothing_and_the_map_is_there_throughout(
    cluster: Cluster,
) -> None:
    tiles = [middle(building(which, 0)) for which in range(BUILDINGS)]
    old = {name: set(cluster.pods(name)) for name in DEPLOYMENTS}
    assert len(old["tiles"]) == 2
    editor, viewer = Editor(cluster), Viewer(cluster.url("tiles"), tiles)
    time.sleep(5)

    cluster.kubectl("rollout", "restart", *(f"deployment/{name}" for name in DEPLOYMENTS), "-n", NAMESPACE)
    cluster.wait_until_ready()
    under_way = editor.is_alive()
    editor.join(patient(300))
    assert editor.fault is None
    assert len(editor.last) == BUILDINGS
    assert not editor.is_alive()
    cluster.wait(lambda: quiet(cluster), 180, "everything is worked off")
    answers = viewer.end()

    print(f"edits during all of it: {under_way}; sent again: {editor.again}; tile server: {dict(answers)}")
    assert answers.total() > 500
    assert set(answers) <= {"200", "204", "304"}, answers
    for name, pods in old.items():
        assert not pods & set(cluster.pods(name)), f"{name} was not replaced"
    for which, edit in editor.last.items():
        assert edit["properties"]["name"] in names_in(cluster, middle(edit)), f"building {which} is not as edited last"
    catalog_says_what_the_ledger_says(cluster, tiles_of(list(editor.last.values())))


def middle(feature: dict[str, Any]) -> Tile:
    """The tile of zoom 18 that has a building's middle."""
    (west, south), _, (east, north) = feature["geometry"]["coordinates"][0][:3]
    found = mercantile.tile((west + east) / 2, (south + north) / 2, 18)
    return Tile(found.z, found.x, found.y)


def quiet(cluster: Cluster) -> bool:
    """Nothing is dirty, owed or unread."""
    with cluster.stack() as stack:
        said = snapshot(stack)
    tiles = said["tiles"]
    waiting = tiles["dirty_live"] + tiles["dirty_backfill"] + sum(tiles["owed"].values()) + said["features"]["outbox"]
    return not waiting and not any(said["lag"].values())


def names_in(cluster: Cluster, tile: Tile) -> list[Any]:
    """The names of what a tile shows, as it is served; none is there twice."""
    answer = httpx.get(f"{cluster.url('tiles')}/tiles/{tile.path}.mvt", trust_env=False, timeout=patient(30))
    assert answer.status_code == 200, tile.path
    found = [feature for layer in decode(answer.content) for feature in layer.features]
    assert len({feature.id for feature in found}) == len(found)
    return [feature.properties["name"] for feature in found]


def catalog_says_what_the_ledger_says(cluster: Cluster, keys: set[str]) -> None:
    with cluster.stack() as stack:
        states = stack.ledger.read(sorted(keys))
    for key, state in states.items():
        (entry,) = cluster.graphql(LATEST, partition=key)["assetNodeOrError"]["assetMaterializations"]
        said = {each["label"]: each.get("text", each.get("intValue")) for each in entry["metadataEntries"]}
        assert (said["revision"], said["content_hash"]) == (state.revision, state.content_hash), key
