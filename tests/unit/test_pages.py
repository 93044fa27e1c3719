"""Pages of the repository lead to files and headings that are there. (Links within docs/ are mkdocs' to check.)"""

from __future__ import annotations

import re

from tests.harness.procs import ROOT

PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s:]*)(?:#([\w-]+))?\)|(?:src|href)=\"([^\":]+)\"")


def headings(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs name them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def lost_links(page: str) -> list[tuple[str, str]]:
    """What a page leads to that is not there: file and heading."""
    place = ROOT / page
    lost = []
    for name, anchor, source in LINK.findall(place.read_text()):
        there = place.parent / (name or source) if name or source else place
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in headings(there.read_text())):
            lost.append((name or source, anchor))
    return lost


def test_pages_lead_to_what_is_there() -> None:
    assert {page: lost for page in PAGES if (lost := lost_links(page))} == {}


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PACKAGE = ROOT / "flytekitplugins_safedist"


def test_contributing_has_a_row_for_each_room() -> None:
    table = CONTRIBUTING.partition("| Room |")[2].partition("\n\n")[0]
    rooms = re.findall(r"^\| `(\w+)/` \|", table, re.MULTILINE)
    assert sorted(rooms) == sorted(init.parent.name for init in PACKAGE.glob("*/__init__.py"))


def test_the_files_that_contributing_names_are_there() -> None:
    named = re.findall(r"`([\w./]+/[\w./]*|[\w/]+\.(?:py|toml|cfg|md|yml))`", CONTRIBUTING)
    assert len(named) > 60
    assert [one for one in named if not (ROOT / one).exists() and not (PACKAGE / one).exists()] == []
