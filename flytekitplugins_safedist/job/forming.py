"""When a round may begin, with whom, and who is missing. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from .facts import End, History
from .membership import Node, Nodes, listed, wait_line
from .rules import Rules


def here(rules: Rules, nodes: Nodes, host: str) -> list[Node]:
    """Who can take part, node 0 (the process *host*) first; () while that cannot."""
    ready = [node for node in nodes if node.state == "ready" and node.linked]
    if rules.fixed:
        ready.sort(key=lambda node: int(node.key))
    else:
        ready.sort(key=lambda node: (node.process != host, node.order))
    return ready[: rules.max_nodes] if ready and ready[0].process == host else []


def is_enough(
    rules: Rules, nodes: Nodes, ready: Sequence[Node], *, hoped: int, waited_since: float, now: float
) -> bool:
    """Whether a round begins with them.

    Args:
        rules: of the job.
        nodes: all of it.
        ready: who can take part.
        hoped: how many there were in the round before, less those that are known to be gone; 0 before the first.
        waited_since: when the round before was settled.
        now: of the same clock.
    """
    if len(ready) < max(1, rules.min_nodes):
        return False
    if len(ready) >= rules.max_nodes:
        return True
    come = sum(node.state in ("ready", "absent") for node in nodes)
    if hoped > 0 and len(ready) == come and come >= hoped:
        return True  # those of the round before are all there again
    were_enough = sorted(node.since for node in ready)[rules.min_nodes - 1]
    return now - max(waited_since, were_enough) >= rules.last_call


def too_few(rules: Rules, nodes: Nodes, history: History) -> End:
    """The end of a job whose nodes have not come."""
    missing, seconds = _missing(rules, nodes), f"{rules.timeout:g} s"
    if rules.fixed:
        which = "node" if len(missing) == 1 else "nodes"
        text = f"{which} {listed(missing)} of {rules.max_nodes} did not arrive within {seconds}"
    else:
        came = f"{len(nodes.came)} process(es) have joined since the job began"
        text = f"fewer than {rules.min_nodes} nodes came together within {seconds}: {came}"
    return End("lost" if history.round >= 0 else "timeout", text, missing=tuple(missing))


def wait_line_of(rules: Rules, nodes: Nodes, waited: float) -> str:
    """What everybody who waits is told now and then."""
    awaits = "a machine with room for the pod, its image, or the end of the pod before it"
    who = f"node(s) {listed(_missing(rules, nodes))}"
    return wait_line(who, waited=waited, limit=rules.timeout, seen="not there yet", awaits=awaits)


def _missing(rules: Rules, nodes: Nodes) -> list[str]:
    ready = {node.key for node in nodes if node.state == "ready" and node.linked}
    if rules.fixed:
        return [str(key) for key in range(rules.max_nodes) if key not in ready]
    return [f"{max(1, rules.min_nodes - len(ready))} of {rules.min_nodes}"]
