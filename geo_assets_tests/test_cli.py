"""The command line: what it answers, and that bad input is one line and an exit code, never a traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from geo_assets import cli
from geo_assets.cli import answers
from geo_assets_tests.world import HERE, World, feature, settings_for


class Answer(NamedTuple):
    code: int
    out: str
    err: str


class Terminal:
    """Runs the command line in this process, in a home of its own."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.home, self._monkeypatch, self._capsys = home, monkeypatch, capsys
        monkeypatch.setenv("GEO_ASSETS_HOME", str(home))
        monkeypatch.setenv("GEO_ASSETS_LOG_LEVEL", "error")
        monkeypatch.setenv("GEO_ASSETS_INGEST_WORKERS", "1")
        monkeypatch.setenv("COLUMNS", "200")
        for console in (answers.out, answers.err):  # They keep the width that the process began with.
            monkeypatch.setattr(console, "width", 200)
            monkeypatch.setattr(console, "height", 50)
        monkeypatch.delenv("GEO_ASSETS_DEBUG", raising=False)
        settings_for(home)

    def __call__(self, *arguments: str) -> Answer:
        self._monkeypatch.setattr(sys, "argv", ["geo-assets", *arguments])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        read = self._capsys.readouterr()
        assert "Traceback" not in read.out + read.err
        return Answer(int(ended.value.code or 0), read.out, read.err)

    def refused(self, *arguments: str) -> str:
        """The one line with which a command refuses."""
        answer = self(*arguments)
        assert answer.code != 0, answer
        lines = [line for line in answer.err.splitlines() if line.strip()]
        assert len(lines) == 1, answer.err
        return lines[0]


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(tmp_path / "home", monkeypatch, capsys)


def write(path: Path, value: Any) -> str:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def test_help_teaches_every_command(terminal: Terminal) -> None:
    answer = terminal("--help")
    assert answer.code == 0
    for command in ("up", "import", "post", "backfill", "status", "dead-letters", "tile", "doctor", "erase"):
        assert command in answer.out
        assert terminal(command, "--help").code == 0


def test_doctor_names_versions_probe_ports_and_disk(terminal: Terminal) -> None:
    answer = terminal("doctor")
    assert answer.code == 0, answer
    for word in ("GEOS", "PROJ probe", "disk", "port 8787", "layers", "sources"):
        assert word in answer.out


def test_doctor_says_what_is_wrong_with_a_layers_file(terminal: Terminal) -> None:
    write(terminal.home / "layers.yaml", "layers:\n  - {name: roads, min_zoom: 30}\n")
    answer = terminal("doctor")
    assert answer.code == 1
    assert "min_zoom 30" in answer.out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layers: [{name: roads, colour: red}]", "colour"),
        ("layers: []", "at least one layer"),
        ("- a list", "a mapping is expected"),
        ("layers: [", "not YAML at line"),
        ("{}", "layers is missing"),
        ("layers: [{name: a}, {name: a}]", "defined twice"),
        ("layers: [{name: a}]\nmax_zom: 3", "max_zom"),
        ("layers: [{name: a, min_pixels: wide}]", "min_pixels"),
    ],
)
def test_a_wrong_layers_file_is_one_line_that_names_the_field(terminal: Terminal, text: str, expected: str) -> None:
    write(terminal.home / "layers.yaml", text)
    assert expected in terminal.refused("import", write(terminal.home / "x.geojson", feature()))


def test_a_wrong_sources_file_is_one_line_that_names_the_field(terminal: Terminal) -> None:
    write(terminal.home / "sources.yaml", "sources: {city: {secret: x}}")
    assert "secret" in terminal.refused("post", write(terminal.home / "x.geojson", feature()))


def test_a_setting_out_of_range_is_one_line_that_names_it(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEO_ASSETS_EDGE_PORT", "99999")
    assert "GEO_ASSETS_EDGE_PORT" in terminal.refused("status")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--bbox", "1,2,3", "--zooms", "4"], "west,south,east,north"),
        (["--bbox", "0,0,500,1", "--zooms", "4"], "±180"),
        (["--bbox", "0,5,1,1", "--zooms", "4"], "south"),
        (["--bbox", "24,60,25,61", "--zooms", "x"], "zooms"),
        (["--bbox", "24,60,25,61", "--zooms", "5-3"], "zooms"),
        (["--bbox", "24,60,25,61", "--zooms", "0-30"], "0..22"),
        (["--bbox", "24,60,25,61", "--zooms", "17"], "16"),
        (["--h3", "nonsense", "--zooms", "4"], "H3"),
        (["--zooms", "4"], "exactly one"),
        (["--region", "/does/not/exist.geojson", "--zooms", "4"], "No such file"),
    ],
)
def test_a_region_that_makes_no_sense_is_refused(terminal: Terminal, arguments: list[str], expected: str) -> None:
    assert expected in terminal.refused("backfill", *arguments)


def test_rule_7_a_region_over_the_cap_is_refused_with_its_number_and_what_to_do(terminal: Terminal) -> None:
    line = terminal.refused("backfill", "--bbox", "20,55,30,65", "--zooms", "0-16", "--yes")
    assert "20,000" in line
    assert "--cap" in line
    assert any(len(word.replace(",", "").strip(":")) >= 6 and word[0].isdigit() for word in line.split())
    with World(terminal.home).stack as stack:
        assert stack.ledger.manifests() == []


def test_rule_7_an_empty_region_is_refused_with_its_number_and_what_to_do(terminal: Terminal) -> None:
    empty = {"type": "FeatureCollection", "features": []}
    assert "no polygon" in terminal.refused(
        "backfill", "--region", write(terminal.home / "r.geojson", empty), "--zooms", "4"
    )
    point = {"type": "Point", "coordinates": [1, 2]}
    assert "no polygon" in terminal.refused(
        "backfill", "--region", write(terminal.home / "p.geojson", point), "--zooms", "4"
    )


def test_a_backfill_shows_its_width_and_writes_its_manifest(terminal: Terminal) -> None:
    answer = terminal("backfill", "--bbox", "24.94,60.16,24.95,60.17", "--zooms", "12,14")
    assert answer.code == 0, answer
    assert "z12" in answer.out
    with World(terminal.home).stack as stack:
        (manifest,) = stack.ledger.manifests()
        assert manifest.state == "marked"
        assert len(stack.ledger.dirty(100)) == manifest.tiles


def test_a_dry_run_writes_nothing(terminal: Terminal) -> None:
    assert terminal("backfill", "--bbox", "24.94,60.16,24.95,60.17", "--zooms", "12", "--dry-run").code == 0
    with World(terminal.home).stack as stack:
        assert stack.ledger.manifests() == []


def test_a_wide_backfill_without_a_terminal_asks_for_yes(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEO_ASSETS_CONFIRM_ABOVE", "3")
    assert "--yes" in terminal.refused("backfill", "--bbox", "24.9,60.1,25,60.2", "--zooms", "14")


def test_an_h3_cell_over_the_date_line_is_two_parts(terminal: Terminal) -> None:
    import h3

    cell = h3.latlng_to_cell(0.0, 179.999, 4)
    answer = terminal("backfill", "--h3", cell, "--zooms", "8", "--dry-run")
    assert answer.code == 0
    assert int(answer.out.split(": ")[1].split()[0]) < 30


def test_backfills_are_listed_followed_and_cancelled(terminal: Terminal) -> None:
    assert "no manifest" in terminal("backfills", "list").out
    assert terminal("backfill", "--bbox", "24.94,60.16,24.95,60.17", "--zooms", "12,14").code == 0
    (shown,) = json.loads(terminal("backfills", "list", "--json").out)
    assert (shown["state"], shown["done"]) == ("marked", 0)
    assert shown["id"] in terminal("backfills", "list").out
    assert "no longer wanted" in terminal("backfills", "cancel", shown["id"]).out
    assert "cancelled already" in terminal.refused("backfills", "cancel", shown["id"])
    for command in ("follow", "cancel"):
        assert "backfills list" in terminal.refused("backfills", command, "nonsense")
    with World(terminal.home).stack as stack:
        assert stack.ledger.dirty(10) == []


def test_a_backfill_over_a_feature_that_is_not_there_is_refused(terminal: Terminal) -> None:
    assert "no source demo ever wrote here" in terminal.refused("backfill", "--feature", "demo:17", "--zooms", "4")
    assert "neither SOURCE:ID" in terminal.refused("backfill", "--feature", "Kamppi", "--zooms", "4")


def test_import_says_what_it_did_and_marks_the_tiles(terminal: Terminal) -> None:
    file = write(terminal.home / "city.geojson", {"type": "FeatureCollection", "features": [feature(1), feature(2)]})
    answer = terminal("import", file)
    assert answer.code == 0, answer
    assert "2 of 2 features are new or changed" in answer.out
    with World(terminal.home).stack as stack:
        assert {m.state for m in stack.ledger.manifests()} == {"marked"}


def test_what_an_import_refuses_is_a_dead_letter_that_can_be_shown_and_replayed(terminal: Terminal) -> None:
    lon, lat = HERE
    bad = feature(2)
    bad["geometry"]["coordinates"] = [[[lon, lat], [lon + 1, lat + 1], [lon + 1, lat], [lon, lat + 1], [lon, lat]]]
    file = write(terminal.home / "city.geojson", {"type": "FeatureCollection", "features": [feature(1), bad]})
    answer = terminal("import", file)
    assert answer.code == 0, answer
    assert "1 refused (invalid_geometry)" in answer.out

    listed = terminal("dead-letters", "list", "--json")
    letter = json.loads(listed.out.splitlines()[0])
    assert letter["reason"] == "invalid_geometry"
    assert terminal("dead-letters", "list").code == 0
    shown = terminal("dead-letters", "show", letter["id"][:12])
    assert "Self-intersection" in shown.out
    fixed = write(terminal.home / "fixed.geojson", feature(2))
    assert terminal("dead-letters", "replay", letter["id"], "--payload", fixed).code == 0
    assert terminal("ingest", "--once").code == 0
    with World(terminal.home).stack as stack:
        assert len(list(stack.features.scan())) == 2


def test_erase_takes_features_out_and_says_what_it_could_not_reach(terminal: Terminal) -> None:
    file = write(terminal.home / "city.geojson", {"type": "FeatureCollection", "features": [feature(1), feature(2)]})
    terminal("import", file)
    assert "--yes" in terminal.refused("erase", "--source", "city")
    answer = terminal("erase", "--source", "city", "--yes")
    assert answer.code == 0
    assert "erased 2 features" in answer.out
    assert "not reached" in answer.out
    with World(terminal.home).stack as stack:
        assert list(stack.features.scan()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tile", "3/9/9"], "x=9"),
        (["tile", "nonsense"], "z/x/y"),
        (["tile", "3:9"], "partition key"),
        (["post", "/does/not/exist"], "No such file"),
        (["import", "/does/not/exist.gpkg"], "exist.gpkg"),
        (["dead-letters", "show", "ffff"], "no dead letter"),
        (["dead-letters", "replay"], "--all"),
        (["dead-letters", "list", "--reason", "boredom"], "boredom"),
        (["erase", "--source", "nobody", "--yes"], "nobody"),
        (["erase", "--device", " "], "--device is empty"),
        (["--home", "/proc/nowhere", "status"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line(terminal: Terminal, arguments: list[str], expected: str) -> None:
    assert expected in terminal.refused(*arguments)


def test_an_unknown_command_and_a_missing_argument_are_usage_errors(terminal: Terminal) -> None:
    for arguments in (["nonsense"], ["tile"], ["backfills", "follow"]):
        answer = terminal(*arguments)
        assert answer.code == 2
        assert answer.err


def test_a_full_disk_is_one_line(terminal: Terminal, tmp_path: Path) -> None:
    import subprocess

    # A limit on the size of files answers as a full disk does, without filling one.
    script = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "sys.argv = ['geo-assets', 'import', sys.argv[1]]\n"
        "from geo_assets.cli import main\n"
        "main()\n"
    )
    many = [feature(n, at=(HERE[0] + n * 1e-4, HERE[1]), note="x" * 200) for n in range(500)]
    file = write(tmp_path / "many.geojson", {"type": "FeatureCollection", "features": many})
    done = subprocess.run([sys.executable, "-c", script, file], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "geo-assets:" in done.stderr


def test_status_is_json_for_programs(terminal: Terminal) -> None:
    report = json.loads(terminal("status", "--json").out)
    assert {"features", "tiles", "lag", "dead_letters", "manifests", "sources", "tilesets"} <= set(report)
    assert terminal("status").code == 0


def test_status_shows_how_current_sources_and_tilesets_are(terminal: Terminal) -> None:
    (terminal.home / "sources.yaml").write_text(
        "sources:\n  city: {default_layer: buildings, default_crs: EPSG:4326, expect_every_s: 0.001}\n  quiet: {}\n"
    )
    world = World(terminal.home)
    world.edit(feature(1, 1), received_ms="1770000000000")
    world.build_dirty()
    world.close()
    assert terminal("publish", "--name", "city").code == 0
    report = json.loads(terminal("status", "--json").out)
    (city, quiet), (tileset,) = report["sources"], report["tilesets"]
    assert (city["watermark"], city["silent"]) == ("2026-02-02T02:40:00.000+00:00", True)
    assert (quiet["received"], quiet["silent_s"], quiet["silent"]) == (None, None, False)
    assert (tileset["name"], tileset["watermark"], tileset["behind_s"]) == ("city", city["watermark"], 0)
    lines = [line.split("  ") for line in terminal("status").out.splitlines()]
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:] if cell.strip()] for cells in lines if len(cells) > 3}
    assert rows["city"] == [tileset["version"], tileset["published"], tileset["watermark"], "nothing", "0"]
    assert rows["quiet"] == ["never sent"]
    shown = terminal("status").out
    assert city["received"] in shown
    assert "every 1 s" in shown
    assert "silent" in shown.split("Tilesets")[0].split("watermark")[1]


def test_a_tile_whose_object_was_cut_off_says_so(terminal: Terminal) -> None:
    from geo_assets.ports import tile_object

    world = World(terminal.home)
    world.edit(feature(1, 1))
    world.build_dirty()
    state = next(iter(world.published().values()))
    assert state.object_name is not None
    for damage in (b"", b"no gzip"):
        world.stack.tiles.put(tile_object(state.object_name), damage)
        assert "cannot be decoded" in terminal.refused("tile", state.key)
    world.close()


def test_tile_decodes_what_is_served(terminal: Terminal) -> None:
    world = World(terminal.home)
    world.edit(feature(2**53 + 1, 1, name="Kiosk"))
    world.build_dirty()
    path = next(s.key for s in world.published().values() if s.key.startswith("14:"))
    world.close()
    answer = terminal("tile", path, "--json")
    read = json.loads(answer.out)
    (layer,) = read["layers"]
    assert layer["features"][0]["id"] == str(2**53 + 1)
    assert "Kiosk" in terminal("tile", read["tile"]).out
