"""The codes of failures, and who pays, in the tables of docs/failures.md, README.md and docs/errors.md, made of the
tables in ``failures.py``, ``errors.py`` and ``hangs/gpus.py``: there alone it is written what becomes of a failure.
What the user reads of it is docs/failures.md's own.

``python scripts/failures.py`` writes them anew; with ``--check`` it exits with 1 where they are not that.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict

from fields import ROOT, between, write

import flytekitplugins_safedist
from flytekitplugins_safedist.errors import SafedistError
from flytekitplugins_safedist.failures import Failure, Payer, Row
from flytekitplugins_safedist.hangs.gpus import XIDS

BEGIN, END = "<!-- failures: made by scripts/failures.py -->", "<!-- end of failures -->"
GPUS_BEGIN, GPUS_END = "<!-- Xids: made by scripts/failures.py -->", "<!-- end of Xids -->"
PAYS = {Payer.NOBODY: "none: the task fails", Payer.RETRIES: "the task's `retries`", Payer.FLYTE: "Flyte"}
FIRST = (
    *(Failure.OWN, Failure.RECOVERABLE, Failure.OUT_OF_MEMORY, Failure.PEER_LOST, Failure.STORAGE, Failure.STOPPED),
    *(Failure.NOT_TOGETHER, Failure.NODE_LOST),
)
"""What README shows."""


def row_of(row: Row, page: str) -> str:
    """Where docs/failures.md says what the user reads of it."""
    found = re.search(rf"^\| {re.escape(row.what)} \| .*$", page, re.MULTILINE)
    if found is None:
        sys.exit(f"docs/failures.md: no row begins with | {row.what} |, as one of failures.py does")
    return found[0]


def failures(page: str) -> str:
    """The last two columns of the table of failures: the code, where each such end has the same, and who pays. Several
    codes that begin as the row's stay: what is found makes the rest of them."""
    for row in (each.row for each in Failure):
        before = row_of(row, page)
        head, code, _ = before.rsplit(" | ", 2)
        codes = code.split(", ")
        if row.code and not (len(codes) > 1 and all(one.startswith(f"`{row.code}") for one in codes)):
            code = f"`{row.code}`"
        page = page.replace(before, f"{head} | {code} | {PAYS[row.payer]} |")
    return page


def of_readme(page: str) -> str:
    """The first of them, as the page of failures has them."""
    rows = [row_of(each.row, page).split(" | ") for each in FIRST]
    lines = [f"{what} | {code} | {pays}" for what, _, code, pays in rows]
    return "\n".join(["| What happens | Code | Who pays for another attempt |", "|---|---|---|", *lines])


def xids() -> str:
    """What a GPU reports, by code."""
    meanings: dict[str, list[str]] = defaultdict(list)
    for xid, (its, name) in XIDS.items():
        meanings[its].append(f"{xid}: {name}")
    lines = ["| Code | Xids | Who pays |", "|---|---|---|"]
    for its, names in meanings.items():
        row = (Failure.GPU_PROGRAM if its.startswith("USER:") else Failure.GPU_FAULT).row
        lines.append(f"| `{its}` | {'; '.join(names)} | {PAYS[row.payer]} |")
    return "\n".join(lines)


def of_errors(page: str) -> str:
    """The last two columns of the table of errors: the code, and who pays."""

    def row(match: re.Match[str]) -> str:
        kind: type[SafedistError] = getattr(flytekitplugins_safedist, match[1], SafedistError)
        error = kind.__new__(kind)
        return f"{match[0].rsplit(' | ', 2)[0]} | `{error.error_code}` | {PAYS[error.failure.row.payer]} |"

    return re.sub(r"^\| `(\w+)` \|.*\|$", row, page, flags=re.MULTILINE)


def main() -> int:
    gpus, page = between(GPUS_BEGIN, GPUS_END, xids()), (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
    pages = {
        "docs/failures.md": lambda page: gpus(failures(page)),
        "README.md": between(BEGIN, END, of_readme(failures(page))),
        "docs/errors.md": of_errors,
    }
    return write(pages, "the tables of failures.py, errors.py and hangs/gpus.py", "scripts/failures.py")


if __name__ == "__main__":
    sys.exit(main())
