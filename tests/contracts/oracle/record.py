"""Record cases anew with the real Go code: ``python tests/contracts/oracle/record.py [CASE ...]``. See README.md."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from google.protobuf.json_format import MessageToDict
from oracle_cases import HERE, NAMES, case
from oracle_registration import registered

PROGRAMS = ("flyte", "operator")
REFUSED = 3


def main(names: list[str]) -> int:
    """Record these cases, or all; says what has changed."""
    with tempfile.TemporaryDirectory() as folder:
        for program in PROGRAMS:
            build = ["go", "build", "-o", str(Path(folder, program)), "."]
            subprocess.run(build, cwd=HERE / "recorder" / program, check=True)
        for name in names or NAMES:
            one = case(name)
            made = record(one, Path(folder))
            changed = made != one
            if changed:
                text = yaml.safe_dump(made, sort_keys=False, width=120, allow_unicode=True)
                (HERE / "cases" / f"{name}.yaml").write_text(text, encoding="utf-8")
            print(f"{name}: {'changed' if changed else 'as it was'}")
    return 0


def record(one: dict[str, Any], programs: Path) -> dict[str, Any]:
    """*one* with what the backend and the operator make of its task today."""
    template, node = registered(one)
    results = ("job", "created", "backend_refuses", "operator_says")
    made = {key: value for key, value in one.items() if key not in results}

    made |= {"template": MessageToDict(template), "node": node}
    asked = {"template": made["template"], "node": node, **one["asked"]}
    job, refused = run(programs / "flyte", json.dumps(asked))
    if refused:
        return {**made, "backend_refuses": refused, "api_server": "not asked"}
    made["job"] = yaml.safe_load(job)
    created, said = run(programs / "operator", job)
    made["created"] = list(yaml.safe_load_all(created))
    if said:
        made["operator_says"] = said
    if (made["job"], made["created"]) != (one.get("job"), one.get("created")):
        made["api_server"] = "not asked"
    return made


def run(program: Path, text: str) -> tuple[str, str]:
    """What the program writes, and what it says; output is empty where it refuses."""
    done = subprocess.run([program], check=False, input=text, capture_output=True, text=True)
    if done.returncode not in (0, REFUSED):
        raise SystemExit(f"{program.name} ended with {done.returncode}: {done.stderr}")
    return done.stdout if done.returncode == 0 else "", done.stderr.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
