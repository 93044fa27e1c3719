"""A hook of mkdocs: what pages say in the README's words, and links out of docs/ (README, examples, code), which become
names, for the site has no copy of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
SECTION = re.compile(r"<!-- README: (.+?) -->")
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Sections of the README where a page asks for them; a link out of docs/ as its text, with the path where the text
    does not say it."""
    return OUTSIDE.sub(_named, SECTION.sub(_section, markdown))


def _section(asked: re.Match[str]) -> str:
    _, title, rest = README.read_text(encoding="utf-8").partition(f"\n## {asked[1]}\n")
    if not title:
        raise ValueError(f"README.md has no section {asked[1]!r}")
    text = re.sub(r"\]\((?!https?:|#|docs/)", "](../", rest.partition("\n## ")[0])
    return text.replace("](docs/", "](")


def _named(link: re.Match[str]) -> str:
    text, path = link.groups()
    return text if path in text else f"{text} (`{path}`)"
