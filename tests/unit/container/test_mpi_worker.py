"""The first process of an MPIJob's worker: one agent, the newest word on where node 0 is, and an end in order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins_safedist.container.mpi import worker
from flytekitplugins_safedist.errors import StagingError
from tests.harness.procs import until
from tests.unit.container.mpi_cluster import Cluster

WAITS = "import os, sys; open({said!r}, 'w').close(); open({word!r}).read()"
LEAVES_IN_ORDER = (
    "import pathlib, signal, sys\n"
    "def leave(*_):\n"
    "    pathlib.Path({out!r}, 'left').touch()\n"
    "    sys.exit(41)\n"
    "signal.signal(signal.SIGTERM, leave)\n"
    "open({said!r}, 'w').close()\n"
    "while True: signal.pause()"
)


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Cluster]:
    """A worker whose first process takes orders."""
    made = Cluster(tmp_path, ["j-worker-0", "j-worker-1"])
    for name in ("said", "word"):
        os.mkfifo(tmp_path / name)
    yield made
    made.end()


@pytest.fixture
def begun(pod: Cluster) -> Cluster:
    pod.begin()
    until(lambda: all(list(pod.tmp.glob(f"{host}/*/socket")) for host in pod.hosts), "the workers take orders")
    return pod


def agent(pod: Cluster, text: str) -> str:
    return text.format(said=str(pod.root / "said"), word=str(pod.root / "word"), out=str(pod.out))


def answers(order: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """All that the worker says about an order, to its end."""
    out, _ = order.communicate(timeout=60)
    return [json.loads(line) for line in out.splitlines()]


def test_an_order_is_answered_with_where_node_0_is_and_how_the_agent_ended(begun: Cluster) -> None:
    assert answers(begun.order(0, "raise SystemExit(7)")) == [
        {"starts": True, "node_0": "10.9.9.9"},
        {"status": 7},
    ]


def test_a_signal_that_ends_an_agent_is_its_status(begun: Cluster) -> None:
    killed = begun.order(0, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert answers(killed)[1] == {"status": 137}


def test_an_agent_that_cannot_be_run_has_failed_like_any_other(begun: Cluster) -> None:
    order = replace(begun.launch(""), argv=("/no/such",))
    done = subprocess.run(order.agent(0, "", 0.0), env=begun.env, check=False, capture_output=True, text=True)

    assert json.loads(done.stdout.splitlines()[1]) == {"status": 127}
    assert "cannot run /no/such: No such file or directory" in begun.log("j-worker-0")


def test_an_agent_that_runs_is_not_started_again_and_one_that_decided_neither(begun: Cluster) -> None:
    first = begun.order(0, agent(begun, WAITS))
    (begun.root / "said").read_text()
    second = begun.order(0, agent(begun, WAITS))
    assert second.stdout is not None
    assert json.loads(second.stdout.readline()) == {"starts": False, "node_0": "10.9.9.9"}

    (begun.root / "word").write_text("")

    assert answers(first)[1] == answers(second)[0] == {"status": 0}
    assert answers(begun.order(0, "raise SystemExit(1)")) == [{"starts": False, "node_0": "10.9.9.9"}, {"status": 0}]


def test_an_agent_that_ended_undecided_is_followed_by_another(begun: Cluster) -> None:
    assert answers(begun.order(0, "raise SystemExit(1)"))[1] == {"status": 1}
    assert answers(begun.order(0, "")) == [{"starts": True, "node_0": "10.9.9.9"}, {"status": 0}]


def test_the_address_of_node_0_that_was_found_last_counts_in_whatever_order_they_come(begun: Cluster) -> None:
    shows = "import os; print(open(os.environ['SAFEDIST_MPI_NODE_0']).read(), os.environ['SAFEDIST_MPI_ENDPOINT'])"
    running = begun.order(1, agent(begun, WAITS + f"; {shows}"), "10.0.0.1", 1.0)
    (begun.root / "said").read_text()
    for address, found in (("10.0.0.3", 3.0), ("10.0.0.2", 2.0)):
        later = begun.order(1, "", address, found)
        assert later.stdout is not None
        later.stdout.readline()
        later.kill()

    (begun.root / "word").write_text("")

    assert answers(running)[1] == {"status": 0}
    assert begun.log("j-worker-1").splitlines() == ["10.0.0.3", " 10.0.0.1:23456"]


def test_signals_that_the_first_process_keeps_from_itself_reach_the_agent(begun: Cluster) -> None:
    prints = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    assert answers(begun.order(0, prints))[1] == {"status": 0}
    assert begun.log("j-worker-0") == "set()\n"


@pytest.mark.parametrize("runs", [True, False])
def test_a_worker_that_is_told_to_stop_ends_its_agent_and_then_itself(begun: Cluster, runs: bool) -> None:
    first = begun.workers["j-worker-0"]
    if runs:
        order = begun.order(0, agent(begun, LEAVES_IN_ORDER))
        (begun.root / "said").read_text()

    first.send_signal(signal.SIGTERM)

    assert first.wait(timeout=60) == 0, "a worker that is Failed fails the job, one that is gone is made anew"
    assert (begun.out / "left").exists() == runs
    assert f"SIGTERM: {int(runs)} agent(s) of this pod have ended" in begun.log("j-worker-0")
    if runs:
        assert answers(order) == [{"starts": True, "node_0": "10.9.9.9"}], "its status is no failure of the agent's"


def test_a_worker_that_leaves_takes_no_further_order(begun: Cluster) -> None:
    told = agent(begun, LEAVES_IN_ORDER).replace(
        "    sys.exit(41)", f"    open({str(begun.root / 'word')!r}).read(); sys.exit()"
    )
    begun.order(0, told)
    (begun.root / "said").read_text()
    begun.workers["j-worker-0"].send_signal(signal.SIGTERM)
    until((begun.out / "left").exists, "the agent is told")

    out, _ = begun.order(0, "").communicate(timeout=60)
    (begun.root / "word").write_text("")

    assert out == "this pod was told to stop\n"
    assert begun.workers["j-worker-0"].wait(timeout=60) == 0


def test_a_worker_that_is_not_there_yet_says_so(pod: Cluster) -> None:
    (pod.tmp / "j-worker-0").mkdir()
    out, _ = pod.order(0, "").communicate(timeout=60)
    assert out == "the worker's first process takes no orders yet (No such file or directory)\n"


def test_a_node_0_without_an_address_says_what_is_missing(begun: Cluster) -> None:
    begun.moves_node_0_to("::1")
    out, _ = begun.order(0, "").communicate(timeout=60)
    assert out == "hostname -i prints no address that others reach: let /etc/hosts name one, as the kubelet writes it\n"


def test_a_first_process_that_is_started_again_in_place_takes_orders(begun: Cluster) -> None:
    begun.workers["j-worker-0"].kill()
    begun.workers["j-worker-0"].wait()
    begun.begin("j-worker-0")
    out = ""
    while "status" not in out:
        out, _ = begun.order(0, "").communicate(timeout=60)
    assert '{"status": 0}' in out


def test_a_read_only_root_takes_orders_on_the_scratch_volume_and_without_one_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)

    assert worker._directory({"SAFEDIST_SCRATCH_ROOT": str(tmp_path)}).parent == tmp_path
    with pytest.raises(StagingError, match=r"mount a volume there \(emptyDir\), or name a directory with TMPDIR"):
        worker._opened({})


def test_what_is_in_the_place_of_its_directory_is_an_error_and_not_followed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / "others").mkdir()
    worker._directory({}).symlink_to(tmp_path / "others")

    with pytest.raises(StagingError, match="Making a place for the launcher's orders"):
        worker._opened({})

    assert list((tmp_path / "others").iterdir()) == []
