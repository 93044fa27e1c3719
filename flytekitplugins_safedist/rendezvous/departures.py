"""Who has left a round before its end, and said so: notes on the job's store that peers act on at once.

A node that is told to stop writes one for itself; a new process writes one for the process whose place it takes, for
that one cannot any more. Without them the others would wait for its word until its heartbeat times out. Functions of
a raw store, for one call each; no waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .protocol import Keys


def note(store: Any, keys: Keys, round_no: int, node: int, why: str) -> bool:
    """Say that a node has left a round. False if it had reported how the round ended there, or had left, before."""
    if not _first_word(store, keys, round_no, node):
        return False
    # In this order: who counts all words of a round finds every note.
    store.set(_key(keys, round_no, node), why)
    store.add(_count(keys, round_no), 1)
    store.add(words(keys, round_no), 1)
    return True


def succeed(store: Any, keys: Keys, node: int) -> int | None:
    """A new process takes a node's place: say so in the round of the one before it, where others may wait for its word.

    Returns the number of that round if the node's ranks had succeeded in it; else None.
    """
    arrived = keys.arrived(node)
    if not store.check([arrived]):
        return None
    round_no = int(store.get(arrived))
    if done(store, keys, round_no, [node]):
        return round_no
    note(store, keys, round_no, node, "a new process has taken its place")
    return None


def report(store: Any, keys: Keys, round_no: int, node: int) -> None:
    """Count a node's report of how a round ended there; once."""
    if _first_word(store, keys, round_no, node):
        store.add(words(keys, round_no), 1)


def words(keys: Keys, round_no: int) -> str:
    """The key that counts the nodes which have said how a round ended, or that they left it."""
    return keys.job(f"reports/{round_no}")


def unheard(store: Any, keys: Keys, round_no: int, nodes: int) -> tuple[int, ...]:
    """The nodes that have said nothing about a round's end."""
    return tuple(node for node in range(nodes) if not store.check([_word(keys, round_no, node)]))


def left(store: Any, keys: Keys, round_no: int, nodes: int) -> dict[int, str]:
    """Why each node that has left a round did; one request where none has."""
    if not store.add(_count(keys, round_no), 0):
        return {}
    found = (node for node in range(nodes) if store.check([_key(keys, round_no, node)]))
    return {node: bytes(store.get(_key(keys, round_no, node))).decode() for node in found}


def take_store(store: Any, keys: Keys, round_no: int) -> None:
    """Say that the node which holds the store leaves a round, and the store with it."""
    store.set(keys.job(f"store-leaves/{round_no}"), "1")


def takes_store(store: Any, keys: Keys, round_no: int) -> bool:
    """Whether it has said so."""
    return bool(store.check([keys.job(f"store-leaves/{round_no}")]))


def make_room(store: Any, keys: Keys, round_no: int) -> None:
    """Say that a round is left because a node wants to join: what fails in it from now on may be the echo of that."""
    store.set(_room(keys, round_no), "1")


def made_room(store: Any, keys: Keys, round_no: int) -> bool:
    """Whether a round is left because a node wants to join."""
    return bool(store.check([_room(keys, round_no)]))


def note_returned(store: Any, keys: Keys, round_no: int, node: int, ranks: Sequence[int]) -> None:
    """Say which ranks of a node had returned from the user's function when a round ended otherwise. Before its report:
    who counts all words of a round finds it."""
    if ranks:
        store.set(_returned(keys, round_no, node), ",".join(map(str, ranks)))


def returned(store: Any, keys: Keys, round_no: int, nodes: int) -> tuple[int, ...]:
    """The ranks that had returned, of all nodes. A request for each: for failures that explain nothing else."""
    found = [key for node in range(nodes) if store.check([key := _returned(keys, round_no, node)])]
    return tuple(sorted(int(rank) for key in found for rank in bytes(store.get(key)).decode().split(",")))


def mark_done(store: Any, keys: Keys, round_no: int, node: int) -> None:
    """Say that a node's ranks have succeeded in a round. Saying it twice counts once."""
    if store.add(_done(keys, round_no, node), 1) == 1:
        store.add(done_count(keys, round_no), 1)


def done_count(keys: Keys, round_no: int) -> str:
    """The key that counts the nodes whose ranks have succeeded in a round."""
    return keys.job(f"done/{round_no}")


def done(store: Any, keys: Keys, round_no: int, nodes: Sequence[int]) -> tuple[int, ...]:
    """Those of *nodes* whose ranks have succeeded in a round: what becomes of them afterwards costs nothing."""
    return tuple(node for node in nodes if store.check([_done(keys, round_no, node)]))


def _returned(keys: Keys, round_no: int, node: int) -> str:
    return keys.job(f"returned/{round_no}/{node}")


def _room(keys: Keys, round_no: int) -> str:
    return keys.job(f"room/{round_no}")


def _first_word(store: Any, keys: Keys, round_no: int, node: int) -> bool:
    return int(store.add(_word(keys, round_no, node), 1)) == 1


def _word(keys: Keys, round_no: int, node: int) -> str:
    return keys.job(f"reported/{round_no}/{node}")


def _key(keys: Keys, round_no: int, node: int) -> str:
    return keys.job(f"left/{round_no}/{node}")


def _count(keys: Keys, round_no: int) -> str:
    return keys.job(f"left/{round_no}")


def _done(keys: Keys, round_no: int, node: int) -> str:
    return keys.job(f"done/{round_no}/{node}")
