"""Pictures of the record of a run for docs/record.md, from real runs, as a browser shows them.

Needs Chromium (Debian: `apt install chromium`). Each page is opened narrow and wide, light and dark; what a page says
on the browser's console is an error here.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = {
    "lost_rank": ["examples/failures/lost_rank.py", "train", "--where", "{saves}", "--steps", "40"],
    "bad_data": ["examples/failures/bad_data.py", "train"],
}
SIZES = ((420, 1000), (1100, 1000))
SCHEMES = {"dark": 0, "light": 1}
"""As Blink numbers them."""


def run(command: list[str], directory: Path) -> Path:
    """Run an example; the page that its log names."""
    words = [word.format(saves=directory / "saves") for word in command]
    pyflyte = Path(sys.executable).with_name("pyflyte")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLYTE_LOCAL_CACHE_ENABLED": "false"}
    done = subprocess.run(
        [pyflyte, "run", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    found = re.findall(r"the record of this run: (\S+run\.html)", done.stderr)
    if not found:
        raise SystemExit(f"no record:\n{done.stdout}\n{done.stderr}")
    return Path(found[-1])


def picture(browser: str, page: Path, to: Path, size: tuple[int, int], scheme: str) -> list[str]:
    """Open a page and keep what it looks like; what it says on the console."""
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--enable-logging=stderr",
                f"--user-data-dir={profile}",
                f"--window-size={size[0]},{size[1]}",
                f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
                f"--screenshot={to}",
                page.resolve().as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def main() -> None:
    """Make all pictures; those of the first run, wide, are the page's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "record", help="directory of the pictures")
    parser.add_argument("pages", type=Path, nargs="*", help="pages that are there, instead of new runs")
    options = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no Chromium on PATH")
    options.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        pages = {path.stem: path for path in options.pages} or {
            name: run(command, Path(directory)) for name, command in RUNS.items()
        }
        said = []
        for name, page in pages.items():
            for size in SIZES:
                for scheme in SCHEMES:
                    to = options.to / f"{name}-{size[0]}-{scheme}.png"
                    said += picture(browser, page, to, size, scheme)
                    print(to)
    if said:
        raise SystemExit("\n".join(["a page says on the console:", *said]))


if __name__ == "__main__":
    main()
