"""The tables of fields in docs/configuration.md and README.md, made of the docstrings of ``config/options.py``: there
alone they are written.

``python scripts/fields.py`` writes them anew; with ``--check`` it exits with 1 where they are not what it would write.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flytekitplugins_safedist.config import options

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- fields: made by scripts/fields.py -->", "<!-- end of fields -->"
PARTS = (options.Scratch, options.Timeouts, options.Logs, options.Hangs, options.Preflight, options.Metrics)


def meanings(cls: type[Any]) -> dict[str, str]:
    """What the docstring says of each field."""
    _, _, attributes = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    found = re.split(r"^ {4}(\w+): ", attributes, flags=re.MULTILINE)[1:]
    return {
        name: markdown(" ".join(text.split())).removesuffix(".")
        for name, text in zip(found[::2], found[1::2], strict=True)
    }


def markdown(text: str) -> str:
    """A docstring's marks as those of a page."""
    text = re.sub(r":\w+:`(?:~[\w.]*\.)?([\w.]+)`", r"`\1`", text).replace("``", "`").replace("|", r"\|")
    text = re.sub(r"\(docs/(\w+)\.md(#[\w-]+)?\)", r"([\1](\1.md\2))", text)
    return re.sub(r"see `(\w+)`", lambda match: of_part(match[1]), text)


def of_part(name: str) -> str:
    """A link to the table of a part of the config, and what that part is."""
    first, _, _ = summary(getattr(options, name)).partition(". ")
    return f"[`{name}`](#{name.lower()}): {first[0].lower()}{first[1:].removesuffix('.')}"


def summary(cls: type[Any]) -> str:
    """How the docstring begins."""
    return markdown(" ".join(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].split()))


def default_of(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"{field.default_factory.__name__}()"  # type: ignore[attr-defined]
    if field.default is dataclasses.MISSING:
        return ""
    return repr(field.default).replace("'", '"')


def table(cls: type[Any]) -> list[str]:
    """A row for each field, in its order."""
    texts = meanings(cls)
    rows = [f"| `{one.name}` | `{default_of(one)}` | {texts[one.name]} |" for one in dataclasses.fields(cls)]
    return ["| Field | Default | Meaning |", "|---|---|---|", *(row.replace("| `` |", "| |") for row in rows)]


def made() -> str:
    """The tables: of the config, then of each part of it."""
    lines = table(options.SafeDistributed)
    for part in (*PARTS, options.Profile):
        lines += ["", f"### {part.__name__}", "", summary(part), "", *table(part)]
    return "\n".join(lines)


def of_readme() -> str:
    """The first of them, one sentence for each field, whose links are those of a page one level up."""
    rows = [re.sub(r"\. .* \|$", " |", row) for row in table(options.SafeDistributed)]
    rows = [re.sub(r"`(\w+\(\)|None)` \| \[`\w+`\](\(#\w+\)): ", r"[`\1`]\2 | ", row) for row in rows]
    rows = [re.sub(r"(\]\(#.*) \(\[.*\)\) \|$", r"\1 |", row) for row in rows]  # one link is enough
    text = re.sub(r"\]\((\w+\.md)", r"](docs/\1", "\n".join(rows))
    return text.replace("](#", "](docs/configuration.md#")


def between(begin: str, end: str, tables: str) -> Callable[[str], str]:
    """What puts tables between two marks of a page."""

    def put(page: str) -> str:
        head, _, rest = page.partition(begin)
        _, _, tail = rest.partition(end)
        return f"{head}{begin}\n{tables}\n{end}{tail}"

    return put


def write(pages: dict[str, Callable[[str], str]], source: str, script: str) -> int:
    """Write pages anew; with ``--check`` only say which are not what would be written. The exit status.

    Args:
        pages: by their path, what makes one of what it is now.
        source: what they are made of, for people.
        script: that does it.
    """
    stale = []
    for name, anew in pages.items():
        path = ROOT / name
        page = path.read_text(encoding="utf-8")
        text = anew(page)
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif text != page:
            stale.append(name)
    if stale:
        print(f"{' and '.join(stale)}: not what {source} say: python {script} writes it")
    return len(stale)


def main() -> int:
    pages = {
        "docs/configuration.md": between(BEGIN, END, made()),
        "README.md": between(BEGIN, END, of_readme()),
    }
    return write(pages, "the docstrings of config/options.py", "scripts/fields.py")


if __name__ == "__main__":
    sys.exit(main())
