"""Words that pages and messages do not use, and what they use instead: plain English of the field.

``python scripts/words.py`` looks through all files that git knows, and exits with 1 if one has such a word.
A line that must have one, such as a quotation, ends with ``words: allow`` in a comment.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
INSTEAD = {
    r"for want of (memory|room|space)": "OOM-killed; out of disk space",
    r"the code's way": "staging",
    r"what ranks import late": "imported on first use",
    r"crews?": "ranks, nodes",
    r"vigil": "watch, wait",
    r"whither|whence|thereby|herein|hitherto|thus": "a plain sentence",
    r"utili[sz]e[sd]?|utili[sz]ing|leverag(e|es|ed|ing)": "use",
    r"simply|obviously|seamless(ly)?|blazing(ly)?|robustly": "nothing: leave it out",
}
WORDS = {re.compile(rf"\b({word})\b", re.IGNORECASE): better for word, better in INSTEAD.items()}


def found(text: str) -> list[tuple[int, str, str]]:
    """Line number, word and what to write instead, of each such word in a text."""
    return [
        (number, match.group(), better)
        for number, line in enumerate(text.splitlines(), start=1)
        if "words: allow" not in line
        for word, better in WORDS.items()
        for match in word.finditer(line)
    ]


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    status = 0
    for name in listed.stdout.splitlines():
        if name in {"scripts/words.py", "tests/unit/test_words.py"} or not (ROOT / name).is_file():
            continue
        for number, word, better in found((ROOT / name).read_text()):
            print(f"{name}:{number}: {word!r}: write: {better}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
