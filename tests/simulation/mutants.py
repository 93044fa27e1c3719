"""Each mutant breaks one rule of the coordinator or of a node's policy; the simulation must see it.

    python -m tests.simulation.mutants                     each, in at most 6,000 orders
    python -m tests.simulation.mutants --orders 500 NAME   some

A mutant is a text of a copy of the two rooms in place of another: (file, before, after), more than once where two sides
keep one rule; and behind these the kind of orders that shows it, where that is not any. One whose text is not there any
more says so: it is to be written anew, or its rule is gone.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "flytekitplugins_safedist"

MUTANTS: dict[str, tuple[str, ...]] = {
    # --- the books
    "the earliest failure is the cause, an echo or not": (
        "coordinator/books.py",
        "return (self.echo, self.time_ns, self.rank)",
        "return (0, self.time_ns, self.rank)",
    ),
    "a lost node costs nothing": (
        "coordinator/books.py",
        '        if self.loss is not None:\n            return "replacement"\n        return "nothing"',
        '        if self.loss is not None:\n            return "nothing"\n        return "nothing"',
    ),
    "a lost node explains a failure of a rank's own": (
        "coordinator/books.py",
        "if self.cause is not None and self.cause.echo == 0:",
        "if self.cause is not None and self.cause.echo == 0 and self.loss is None:",
    ),
    "one restart too many": (
        "coordinator/books.py",
        "elif len(before) >= rules.max_restarts:",
        "elif len(before) > rules.max_restarts:",
    ),
    "the same failure at the same step is tried again": (
        "coordinator/books.py",
        "elif cause.place and any(",
        "elif not cause.place and any(",
        "same",
    ),
    "a worker that dies again and again is replaced again and again": (
        "coordinator/books.py",
        "if rules.is_fixed and len(lives) == _RELAPSES",
        "if rules.is_fixed and len(lives) > _RELAPSES",
        "relapse",
    ),
    "a full memory is not told": (
        "coordinator/books.py",
        'if last.is_explained else "lost"',
        'if last.memory is None else "lost"',
        "relapse",
    ),
    "books are not merged": (
        "coordinator/coordinator.py",
        "self.books = before.merged(status.books)",
        "self.books = before if status.books.round <= before.round else status.books",
    ),
    "what a process says that is gone is not heard": (
        "coordinator/coordinator.py",
        "        self._learn(status, now)  # also of a process that is gone: a late cause counts\n",
        "        if status.process not in self._outsiders:\n            self._learn(status, now)\n",
        "late",
    ),
    "a verdict stays, whatever comes late": (
        "coordinator/coordinator.py",
        'if late is not None and late.kind == "failed":\n            self.verdict = late',
        'if late is not None and late.kind == "failed":\n            pass',
        "late",
    ),
    # --- who leads
    "a leader does not wait for its own sign": (
        "coordinator/sign.py",
        "self.in_doubt = not rules.is_alone",
        "self.in_doubt, self.term = False, 1",
        "early",
    ),
    "a leader that stood still goes on as if nothing had been": (
        "coordinator/coordinator.py",
        "            self.lead.doubt(now)\n            self._paused = now",
        "            self._paused = now",
        "doze",
    ),
    "a leader does not mind that another one leads": (
        "coordinator/sign.py",
        "if self.term and sign is not None and sign.leader > self.leader:",
        "if self.term < 0:",
        "doze",
    ),
    "a look from before the pause counts": (
        "coordinator/sign.py",
        "if look.since < self._since or self._rules.is_alone:",
        "if self._rules.is_alone:",
        "doze",
    ),
    "who stood still blames the others": (
        "coordinator/coordinator.py",
        "            seat.heard += paused",
        "            pass",
        "pause",
    ),
    "a pause of node 0 explains no rank that has lost its peers": (
        "coordinator/coordinator.py",
        "is_explained = status.is_cut or (cause is not None and cause.echo > 0)",
        "is_explained = status.is_cut",
        "pause",
    ),
    "a later leader ends the job for a node that cannot begin": (
        "coordinator/coordinator.py",
        "if self.lead.is_first and self.books.round == NO_ROUND:",
        "if self.books.round == NO_ROUND:",
        "coordinator/coordinator.py",
        'trouble = "cannot begin" if self.me in self._cannot else ""',
        'trouble = ""',
        "early",
    ),
    "node 0 that cannot begin leads all the same": (
        "coordinator/coordinator.py",
        'trouble = "cannot begin" if self.me in self._cannot else ""',
        'trouble = ""',
        "early",
    ),
    # --- rounds
    "a node without ranks is quiet, whether or not it has heard of the round": (
        "coordinator/coordinator.py",
        'return seat is not None and seat.status.phase == "idle" and seat.status.round == self.books.round',
        'return seat is not None and seat.status.phase == "idle"',
        "coordinator/coordinator.py",
        "has_heard = seat.is_linked and status.round == self.books.round",
        "has_heard = seat.is_linked",
        "same",
    ),
    "patience is shorter than what it waits for": (
        "coordinator/rules.py",
        "return self.heartbeat + self.grace + self.settle + self.stop + self.kill",
        "return self.grace",
    ),
    "a success needs one node": (
        "coordinator/coordinator.py",
        'if state.phase == "running" and len(state.returned) == self.books.size:',
        'if state.phase == "running" and state.returned:',
    ),
    "a node that is lost after its ranks have returned ends the round": (
        "coordinator/coordinator.py",
        'if state.phase == "running" and rank not in state.returned:\n            self._end_round',
        'if state.phase == "running":\n            self._end_round',
        "done",
    ),
    "what a status says of another round counts for this one": (
        "coordinator/coordinator.py",
        "if process in self._state.ranks and status.round == self.books.round:",
        "if process in self._state.ranks:",
    ),
    "nodes are not waited for without end": (
        "coordinator/coordinator.py",
        "elif now - self._state.since > self.rules.rendezvous:",
        "elif now < 0:",
    ),
    "a range runs on with fewer nodes than it may have": (
        "coordinator/coordinator.py",
        'elif state.phase == "running" and self._may_join(now):',
        "elif False:",
    ),
    "a node joins before the others have saved": (
        "coordinator/coordinator.py",
        "return state.saves.have_saved(call) or now - since >= self.rules.rendezvous",
        "return True",
    ),
    "a new leader of a range begins at once": (
        "coordinator/coordinator.py",
        "patience = rules.last_call + (0.0 if knows_others else rules.heartbeat + rules.grace)",
        "patience = rules.last_call",
        "successor",
    ),
    "ranks start though no check has found the nodes fit": (
        "coordinator/coordinator.py",
        "is_checks=rules.checks and not self.books.checks,",
        "is_checks=False,",
    ),
    "a node that is not fit takes part": (
        "coordinator/coordinator.py",
        "        if fitness.code:\n",
        "        if not fitness.text:\n",
    ),
    "a machine that is broken takes part in the next round": (
        "coordinator/coordinator.py",
        "        self._leave_out_machine()\n",
        "",
        "machine",
    ),
    "a machine that is left out takes part": (
        "coordinator/coordinator.py",
        "elif self._takes_no_part(status):",
        "elif False:",
        "machine",
    ),
    "two rounds meet at one port": (
        "coordinator/coordinator.py",
        "could = could and status.offer is not None and status.offer.after == self.books.round",
        "could = could and status.offer is not None",
    ),
    # --- saves and hangs
    "all save at the lowest floor": (
        "coordinator/saves.py",
        "self._highest = max(self._highest, status.floor.step)",
        "self._highest = min(self._highest if self._highest >= 0 else 10**9, status.floor.step)",
    ),
    "nobody is waited for as floors are asked for": (
        "coordinator/saves.py",
        "if self.save.step is None and not self._missing:",
        "if self.save.step is None and len(self._missing) < len(self._there):",
    ),
    "a pod that is told to stop does not wait for the save": (
        "agent/policy.py",
        "return has_saved or not self._is_needed or now >= until",
        "return True",
        "preempt",
    ),
    "a pod that is told to stop waits though all have saved": (
        "agent/policy.py",
        "has_saved = save is not None and save.is_urgent and save.is_done",
        "has_saved = False",
        "preempt",
    ),
    "a hang is never shown": (
        "coordinator/inquiry.py",
        "self.hang, self._before = replace(hang, is_news=is_news), None",
        "self._before = None",
        "hang",
    ),
    "a hang needs no suspicion": (
        "coordinator/inquiry.py",
        "return is_free and (is_wanted or self._before is not None)",
        "return is_free and self._next < 0 and is_wanted",
        "hang",
    ),
    # --- a node
    "ranks of the next round start while those before end": (
        "agent/policy.py",
        'if status.phase == "idle" and course.round > status.round:',
        'if status.phase in ("idle", "ending") and course.round > status.round:',
        "coordinator/coordinator.py",
        'could = has_heard and status.phase == "idle" and status.cannot is None',
        'could = status.phase in ("idle", "ending") and status.cannot is None',
        "coordinator/coordinator.py",
        'return seat is not None and seat.status.phase == "idle" and seat.status.round == self.books.round',
        'return seat is not None and seat.status.phase in ("idle", "ending")',
    ),
    "a node obeys a lesser leader": ("agent/policy.py", "if course.leader < self.status.leader:", "if False:", "older"),
    "a node that cannot hear node 0 lets its ranks run": (
        "agent/policy.py",
        'if cut > rules.grace and status.phase == "running":',
        'if cut > 10_000 and status.phase == "running":',
    ),
    "who finds no leader uploads, however fresh its sign is": (
        "agent/policy.py",
        "is_fresh = self._watch.is_fresh(self.rules, now)",
        "is_fresh = False",
        "island",
    ),
    "a node exits 0 when it hears the verdict": (
        "agent/policy.py",
        'self._hand_out_once("verdict", Say("done here; waiting until node 0 has uploaded"))',
        'self._exit_when_quiet(0, "done")',
    ),
    "a leader uploads before it has looked": (
        "agent/policy.py",
        "            self._upload(verdict)\n        else:\n            self._look(now)",
        "            pass\n        self._upload(verdict)",
        "pause",
    ),
    "the only pod of a job leaves without a verdict": (
        "agent/policy.py",
        "if self.rules.is_alone and not self._is_replaced:",
        "if False:",
        "lone",
    ),
    "a cause is said when no rank is left": (
        "agent/policy.py",
        "            self._note(self.books.noting(Outcome(cause.round, cause)))\n            if phase",
        "            if phase",
    ),
}


def edits_of(name: str) -> list[tuple[str, ...]]:
    """A mutant's edits: the file, the text that is to be there once, and what comes in its place."""
    parts = MUTANTS[name]
    return [parts[at : at + 3] for at in range(0, len(parts) - 2, 3)]


def play(name: str, orders: int) -> str:
    """What the simulation sees of a mutant."""
    parts, edits = MUTANTS[name], edits_of(name)
    profile = parts[len(parts) // 3 * 3 :]
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for part in ("coordinator", "agent", "texts.py"):
            source, to = ROOT / PACKAGE / part, copy / PACKAGE / part
            to.parent.mkdir(exist_ok=True)
            shutil.copytree(source, to) if source.is_dir() else shutil.copy(source, to)
        (copy / PACKAGE / "__init__.py").touch()
        shutil.copytree(ROOT / "tests" / "simulation", copy / "tests" / "simulation")
        for file, before, after in edits:
            text = (copy / PACKAGE / file).read_text()
            if text.count(before) != 1:
                return f"IS NO MUTANT: {before!r} is {text.count(before)} times in {file}"
            (copy / PACKAGE / file).write_text(text.replace(before, after))
        command = [sys.executable, "-m", "tests.simulation", str(orders), "--stop"]
        command += [f"--profile={each}" for each in profile]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    if not done.returncode:
        return f"NOT SEEN in {orders}"
    last = (done.stdout + done.stderr).strip().splitlines()[-1]
    found = re.search(r"order (\d+)", last)
    return f"red after {int(found[1]) + 1 if found else '?'}: {last[:140]}"


def main() -> int:
    """Play them; how many are not seen."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--orders", type=int, default=6000)
    parser.add_argument("names", nargs="*", default=list(MUTANTS))
    chosen = parser.parse_args()
    alive = 0
    for name in chosen.names:
        seen = play(name, chosen.orders)
        alive += not seen.startswith("red")
        print(f"{name}: {seen}", flush=True)
    print(f"{len(chosen.names) - alive} of {len(chosen.names)} are seen")
    return alive


if __name__ == "__main__":
    sys.exit(min(1, main()))
