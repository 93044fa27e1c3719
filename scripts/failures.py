"""The tables of failures in docs/failures.md, README.md and docs/errors.md, made of the tables in ``failures.py``,
``errors.py`` and ``hangs/gpus.py``: there alone it is written what becomes of a failure.

``python scripts/failures.py`` writes them anew; with ``--check`` it exits with 1 where they are not that.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict

from fields import between, write

import flytekitplugins_safedist
from flytekitplugins_safedist.errors import SafedistError
from flytekitplugins_safedist.failures import ROWS, Failure, Payer, Row
from flytekitplugins_safedist.hangs.gpus import HARDWARE, USERS

BEGIN, END = "<!-- failures: made by scripts/failures.py -->", "<!-- end of failures -->"
GPUS_BEGIN, GPUS_END = "<!-- Xids: made by scripts/failures.py -->", "<!-- end of Xids -->"
PAYS = {Payer.NOBODY: "none: the task fails", Payer.RETRIES: "the task's `retries`", Payer.FLYTE: "Flyte"}
FIRST = (
    *(Failure.OWN, Failure.RECOVERABLE, Failure.OUT_OF_MEMORY, Failure.PEER_LOST, Failure.STORAGE, Failure.STOPPED),
    *(Failure.NOT_TOGETHER, Failure.NODE_LOST),
)
"""What README shows."""
BESIDE = (
    "| storage is down for a moment, while code, inputs or outputs move | each try that failed, and when the next one "
    "is | | goes on (`Timeouts.upload`) |",
    "| nothing can be uploaded: the store is down, or the pod is told to stop before the task is loaded | the cause, "
    "as the container's termination message | | the pod exits [137](kubeflow.md#who-reads-the-exit-code): it is "
    "replaced where an operator does that, else Flyte |",
)
"""What ends with no verdict."""


def code(row: Row) -> str:
    return row.codes or f"`{row.code}`"


def failures() -> str:
    """Every failure: what the user reads, its code, who pays."""
    rows = [f"| {row.what} | {row.read} | {code(row)} | {PAYS[row.payer]} |" for row in ROWS.values()]
    head = ["| What happens | What you read | Code | Who pays for another attempt |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, *BESIDE])


def of_readme() -> str:
    """The first of them."""
    rows = [f"| {ROWS[each].what} | {code(ROWS[each])} | {PAYS[ROWS[each].payer]} |" for each in FIRST]
    return "\n".join(["| What happens | Code | Who pays for another attempt |", "|---|---|---|", *rows])


def xids() -> str:
    """What a GPU reports, by code."""
    meanings: dict[str, list[str]] = defaultdict(list)
    for xid, name in USERS.items():
        meanings["USER:GpuXidError"].append(f"{xid}: {name}")
    for xid, (its, name) in HARDWARE.items():
        meanings[its].append(f"{xid}: {name}")
    lines = ["| Code | Xids | Who pays |", "|---|---|---|"]
    for its, names in meanings.items():
        row = ROWS[Failure.GPU_PROGRAM if its.startswith("USER:") else Failure.GPU_FAULT]
        lines.append(f"| `{its}` | {'; '.join(names)} | {PAYS[row.payer]} |")
    return "\n".join(lines)


def of_errors(page: str) -> str:
    """The last two columns of the table of errors: the code, and who pays."""

    def row(match: re.Match[str]) -> str:
        kind: type[SafedistError] = getattr(flytekitplugins_safedist, match[1], SafedistError)
        error = kind.__new__(kind)
        return f"{match[0].rsplit(' | ', 2)[0]} | `{error.error_code}` | {PAYS[ROWS[error.failure].payer]} |"

    return re.sub(r"^\| `(\w+)` \|.*\|$", row, page, flags=re.MULTILINE)


def main() -> int:
    tables, gpus = between(BEGIN, END, failures()), between(GPUS_BEGIN, GPUS_END, xids())
    pages = {
        "docs/failures.md": lambda page: gpus(tables(page)),
        "README.md": between(BEGIN, END, of_readme()),
        "docs/errors.md": of_errors,
    }
    return write(pages, "the tables of failures.py, errors.py and hangs/gpus.py", "scripts/failures.py")


if __name__ == "__main__":
    sys.exit(main())
