"""Each mutant breaks one rule of the coordinator or of a node's policy; the simulation must see it.

    python -m tests.simulation.mutants                     each, in at most 6,000 orders
    python -m tests.simulation.mutants --orders 500 NAME   some

One whose text is not there any more says so: it is to be written anew, or its rule is gone.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "flytekitplugins_safedist"

RULES = """
# the books
@ coordinator/books.py: the earliest failure is the cause, an echo or not
-return (self.echo, self.time_ns, self.rank)
+return (0, self.time_ns, self.rank)
@ coordinator/books.py: a lost node costs nothing
-        if self.loss is not None:
-            return "replacement"
-        return "nothing"
+        if self.loss is not None:
+            return "nothing"
+        return "nothing"
@ coordinator/books.py: a lost node explains a failure of a rank's own
-if self.cause is not None and self.cause.echo == 0:
+if self.cause is not None and self.cause.echo == 0 and self.loss is None:
@ coordinator/books.py: one restart too many
-elif len(before) >= rules.max_restarts:
+elif len(before) > rules.max_restarts:
@ coordinator/books.py same: the same failure at the same step is tried again
-elif cause.place and any(
+elif not cause.place and any(
@ coordinator/books.py relapse: a worker that dies again and again is replaced again and again
-if rules.is_fixed and len(lives) == _RELAPSES
+if rules.is_fixed and len(lives) > _RELAPSES
@ coordinator/books.py relapse: a full memory is not told
-if last.is_explained else "lost"
+if last.memory is None else "lost"
@ coordinator/coordinator.py: books are not merged
-self.books = before.merged(status.books)
+self.books = before if status.books.round <= before.round else status.books
@ coordinator/coordinator.py late: what a process says that is gone is not heard
-        self._learn(status, now)  # also of a process that is gone: a late cause counts
+        if status.process not in self._outsiders:
+            self._learn(status, now)
@ coordinator/coordinator.py late: a verdict stays, whatever comes late
-if late is not None and late.kind == "failed":
-            self.verdict = late
+if late is not None and late.kind == "failed":
+            pass
# who leads
@ coordinator/sign.py early: a leader does not wait for its own sign
-self.in_doubt = not rules.is_alone
+self.in_doubt, self.term = False, 1
@ coordinator/coordinator.py doze: a leader that stood still goes on as if nothing had been
-            self.lead.doubt(now)
-            self._paused = now
+            self._paused = now
@ coordinator/sign.py doze: a leader does not mind that another one leads
-if self.term and sign is not None and sign.leader > self.leader:
+if self.term < 0:
@ coordinator/sign.py doze: a look from before the pause counts
-if look.since < self._since or self._rules.is_alone:
+if self._rules.is_alone:
@ coordinator/coordinator.py pause: who stood still blames the others
-            seat.heard += paused
+            pass
@ coordinator/coordinator.py pause: a pause of node 0 explains no rank that has lost its peers
-is_explained = status.is_cut or (cause is not None and cause.echo > 0)
+is_explained = status.is_cut
@ coordinator/coordinator.py early: a later leader ends the job for a node that cannot begin
-if self.lead.is_first and self.books.round == NO_ROUND:
+if self.books.round == NO_ROUND:
@ coordinator/coordinator.py
-trouble = "cannot begin" if self.me in self._cannot else ""
+trouble = ""
@ coordinator/coordinator.py early: node 0 that cannot begin leads all the same
-trouble = "cannot begin" if self.me in self._cannot else ""
+trouble = ""
# rounds
@ coordinator/coordinator.py same: a node without ranks is quiet, whether or not it has heard of the round
-return seat is not None and seat.status.phase == "idle" and seat.status.round == self.books.round
+return seat is not None and seat.status.phase == "idle"
@ coordinator/coordinator.py
-has_heard = seat.is_linked and status.round == self.books.round
+has_heard = seat.is_linked
@ coordinator/rules.py: patience is shorter than what it waits for
-return self.heartbeat + self.grace + self.settle + self.stop + self.kill
+return self.grace
@ coordinator/coordinator.py: a success needs one node
-if state.phase == "running" and len(state.returned) == self.books.size:
+if state.phase == "running" and state.returned:
@ coordinator/coordinator.py done: a node that is lost after its ranks have returned ends the round
-if state.phase == "running" and rank not in state.returned:
-            self._end_round
+if state.phase == "running":
+            self._end_round
@ coordinator/coordinator.py: what a status says of another round counts for this one
-if process in self._state.ranks and status.round == self.books.round:
+if process in self._state.ranks:
@ coordinator/coordinator.py: nodes are not waited for without end
-elif now - self._state.since > self.rules.rendezvous:
+elif now < 0:
@ coordinator/coordinator.py: a range runs on with fewer nodes than it may have
-elif state.phase == "running" and self._may_join(now):
+elif False:
@ coordinator/coordinator.py: a node joins before the others have saved
-return state.saves.have_saved(call) or now - since >= self.rules.rendezvous
+return True
@ coordinator/coordinator.py successor: a new leader of a range begins at once
-patience = rules.last_call + (0.0 if knows_others else rules.heartbeat + rules.grace)
+patience = rules.last_call
@ coordinator/coordinator.py: ranks start though no check has found the nodes fit
-is_checks=rules.checks and not self.books.checks,
+is_checks=False,
@ coordinator/coordinator.py: a node that is not fit takes part
-        if fitness.code:
+        if not fitness.text:
@ coordinator/coordinator.py machine: a machine that is broken takes part in the next round
-        self._leave_out_machine()
+
@ coordinator/coordinator.py machine: a machine that is left out takes part
-elif self._takes_no_part(status):
+elif False:
@ coordinator/coordinator.py: two rounds meet at one port
-could = could and status.offer is not None and status.offer.after == self.books.round
+could = could and status.offer is not None
# saves and hangs
@ coordinator/saves.py: all save at the lowest floor
-self._highest = max(self._highest, status.floor.step)
+self._highest = min(self._highest if self._highest >= 0 else 10**9, status.floor.step)
@ coordinator/saves.py: nobody is waited for as floors are asked for
-if self.save.step is None and not self._missing:
+if self.save.step is None and len(self._missing) < len(self._there):
@ agent/policy.py preempt: a pod that is told to stop does not wait for the save
-return has_saved or not self._is_needed or now >= until
+return True
@ agent/policy.py preempt: a pod that is told to stop waits though all have saved
-has_saved = save is not None and save.is_urgent and save.is_done
+has_saved = False
@ coordinator/inquiry.py hang: a hang is never shown
-self.hang, self._before = replace(hang, is_news=is_news), None
+self._before = None
@ coordinator/inquiry.py hang: a hang needs no suspicion
-return is_free and (is_wanted or self._before is not None)
+return is_free and self._next < 0 and is_wanted
# a node
@ agent/policy.py: ranks of the next round start while those before end
-if status.phase == "idle" and course.round > status.round:
+if status.phase in ("idle", "ending") and course.round > status.round:
@ coordinator/coordinator.py
-could = has_heard and status.phase == "idle" and status.cannot is None
+could = status.phase in ("idle", "ending") and status.cannot is None
@ coordinator/coordinator.py
-return seat is not None and seat.status.phase == "idle" and seat.status.round == self.books.round
+return seat is not None and seat.status.phase in ("idle", "ending")
@ agent/policy.py older: a node obeys a lesser leader
-if course.leader < self.status.leader:
+if False:
@ agent/policy.py: a node that cannot hear node 0 lets its ranks run
-if cut > rules.grace and status.phase == "running":
+if cut > 10_000 and status.phase == "running":
@ agent/policy.py island: who finds no leader uploads, however fresh its sign is
-is_fresh = self._watch.is_fresh(self.rules, now)
+is_fresh = False
@ agent/policy.py: a node exits 0 when it hears the verdict
-self._hand_out_once("verdict", Say("done here; waiting until node 0 has uploaded"))
+self._exit_when_quiet(0, "done")
@ agent/policy.py pause: a leader uploads before it has looked
-            self._upload(verdict)
-        else:
-            self._look(now)
+            pass
+        self._upload(verdict)
@ agent/policy.py lone: the only pod of a job leaves without a verdict
-if self.rules.is_alone and not self._is_replaced:
+if False:
@ agent/policy.py: a cause is said when no rank is left
-            self._note(self.books.noting(Outcome(cause.round, cause)))
-            if phase
+            if phase
"""
"""As a patch: the file, the kind of orders that shows it, where that is not any, and the mutant's name; the text that
is there once, and what comes in its place. A file without a name is a further edit of the same mutant: two sides keep
one rule."""


@dataclass
class Mutant:
    """What is changed in a copy of the two rooms, as file, text before and after; and the kind of orders."""

    kind: str
    edits: list[tuple[str, str, str]] = field(default_factory=list)


def mutants() -> dict[str, Mutant]:
    """All of them by name."""
    found: dict[str, Mutant] = {}
    for file, kind, name, text in re.findall(r"^@ (\S+?)(?: (\w+))?(?:: (.*))?\n((?:[-+].*\n)+)", RULES, re.MULTILINE):
        before, after = ("\n".join(re.findall(rf"^\{sign}(.*)", text, re.MULTILINE)) for sign in "-+")
        if name:
            mutant = found[name] = Mutant(kind)
        mutant.edits.append((file, before, after))
    return found


MUTANTS = mutants()


def play(name: str, orders: int) -> str:
    """What the simulation sees of a mutant."""
    mutant = MUTANTS[name]
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for part in ("coordinator", "agent", "texts.py"):
            source, to = ROOT / PACKAGE / part, copy / PACKAGE / part
            to.parent.mkdir(exist_ok=True)
            shutil.copytree(source, to) if source.is_dir() else shutil.copy(source, to)
        (copy / PACKAGE / "__init__.py").touch()
        shutil.copytree(ROOT / "tests" / "simulation", copy / "tests" / "simulation")
        for file, before, after in mutant.edits:
            text = (copy / PACKAGE / file).read_text()
            if text.count(before) != 1:
                return f"IS NO MUTANT: {before!r} is {text.count(before)} times in {file}"
            (copy / PACKAGE / file).write_text(text.replace(before, after))
        command = [sys.executable, "-m", "tests.simulation", str(orders), "--stop"]
        command += [f"--profile={mutant.kind}"] if mutant.kind else []
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
