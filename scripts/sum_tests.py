#!/usr/bin/env python3
"""Add up pytest's JUnit files, name every skipped test with its reason, and print the sum as the last line.

Exit status: 0 all passed; 1 a test failed, or was skipped: where this runs nothing is missing that could excuse one.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

FAILED, SKIPPED, PASSED = "failed", "skipped", "passed"


def outcome(case: ET.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return FAILED
    return SKIPPED if case.find("skipped") is not None else PASSED


def outcomes(paths: list[Path]) -> dict[str, tuple[str, str]]:
    """Test -> (outcome, reason). A test whose teardown fails has two records: the worse one counts.

    A report that is not there counts as one failure: the session that should have written it has died.
    """
    order = (PASSED, SKIPPED, FAILED)
    found: dict[str, tuple[str, str]] = {}
    for path in paths:
        try:
            root = ET.parse(path).getroot()
        except (OSError, ET.ParseError) as error:
            found[str(path)] = (FAILED, f"no report: {error}")
            continue
        for case in root.iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            mark = next((case.find(tag) for tag in ("failure", "error", "skipped") if case.find(tag) is not None), None)
            result = (outcome(case), mark.get("message", "") if mark is not None else "")
            found[name] = max(found.get(name, (PASSED, "")), result, key=lambda one: order.index(one[0]))
    return found


def main(arguments: list[str]) -> int:
    found = outcomes([Path(argument) for argument in arguments])
    for name, (what, reason) in sorted(found.items()):
        if what != PASSED:
            print(f"{what}: {name}: {reason}")
    count = Counter(what for what, _ in found.values())
    print(f"{count[PASSED]} passed, {count[FAILED]} failed, {count[SKIPPED]} skipped")
    return 0 if count[PASSED] and not count[FAILED] and not count[SKIPPED] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
