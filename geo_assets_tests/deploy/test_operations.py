"""docs/operations.md: every alert and every check has an entry, and every runbook link leads to one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from geo_assets_tests.deploy.examples import DEPLOY

DOCS = DEPLOY.parent / "docs"
TEXT = (DOCS / "operations.md").read_text(encoding="utf-8")
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]


def anchor(heading: str) -> str:
    """The anchor that a heading gets on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def headings(text: str) -> set[str]:
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return {anchor(found) for found in re.findall(r"^#+ (.+)$", plain, flags=re.MULTILINE)}


def entries(section: str) -> dict[str, str]:
    """Entries of a section by name, with their text."""
    body = re.split(r"^## ", TEXT.partition(f"\n## {section}\n")[2], flags=re.MULTILINE)[0]
    parts = re.split(r"^### (.+)$", body, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_alert_of_prometheus_has_an_entry_and_no_other_has() -> None:
    assert sorted(entries("Alerts")) == sorted(rule["alert"] for rule in RULES)


def test_every_check_of_the_catalog_has_an_entry_and_no_other_has() -> None:
    from geo_assets.definitions import defs

    names = {key.name for key in defs.resolve_asset_graph().asset_check_keys}

    assert set(entries("Checks")) == names


@pytest.mark.parametrize("section", ["Alerts", "Checks"])
def test_every_entry_says_cause_look_and_mend(section: str) -> None:
    for name, text in entries(section).items():
        for what in ("Cause", "[Ll]ook", "[Mm]end"):
            assert re.search(rf"^- .*\b{what}\b.*:", text, flags=re.MULTILINE), (name, what)


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_a_runbook_link_leads_to_the_alerts_own_heading(rule: dict[str, dict[str, str]]) -> None:
    path, _, where = rule["annotations"]["runbook"].partition("#")

    assert where == anchor(str(rule["alert"]))
    assert where in headings((DEPLOY.parent / path).read_text(encoding="utf-8"))


def test_links_of_the_page_lead_somewhere() -> None:
    for path, where in re.findall(r"\]\(([\w.\-/]*)(?:#([\w\-]+))?\)", TEXT):
        page = DOCS / path if path else DOCS / "operations.md"
        assert Path(page).is_file(), path
        if where:
            assert where in headings(page.read_text(encoding="utf-8")), (path, where)


def test_commands_name_the_namespace_and_no_wait_is_for_success_alone() -> None:
    """A Job that failed never gets the condition `complete`: who waits for that waits for ever."""
    commands = re.findall(r"^```bash\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)
    kubectl = [each for block in commands for each in re.findall(r"kubectl (?!create -f -).*", block)]

    assert kubectl
    assert [each for each in kubectl if not each.startswith("kubectl -n geo-assets ")] == []
    assert "kubectl wait" not in TEXT
    # Of a selector kubectl shows the last ten lines unless it is told.
    assert all("--tail=-1" in each for each in kubectl if " logs " in each)


def test_the_canary_s_commands_wait_for_a_failure_too() -> None:
    (block,) = re.findall(r"^```bash\n(IMAGE=.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)

    assert "*Complete*" in block
    assert "*Failed*" in block
    for path in re.findall(r"deploy/[\w./-]+", block):
        assert (DEPLOY.parent / path).exists(), path
