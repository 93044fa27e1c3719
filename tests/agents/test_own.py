"""What a module makes as it is imported is its rank's own: in a forked rank as in a fresh interpreter."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator

import pytest


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(32):
            self.request.sendall(data)


@pytest.fixture
def echo() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield str(server.server_address[1])
        server.shutdown()


def test_everything_is_each_ranks_own_in_forked_ranks_as_in_fresh_interpreters(warm, tmp_path, ranks_gate, echo):
    environment = {**ranks_gate.environment, "TEST_ECHO": echo, "FLYTE_INTERNAL_EXECUTION_ID": "f0123"}
    facts = {}
    for how in ("forked", "fresh"):
        ended = warm.run(f"job_own:{how}", tmp_path / how, kind="execute", environment=environment)
        assert ended.code == 0, ended.err
        assert f"start_method {'preload' if how == 'forked' else 'spawn'}" in ended.err
        assert "start again" not in ended.out
        facts[how] = [json.loads(line) for line in ranks_gate.heard(2)]
        for rank in range(2):
            assert f"[rank {rank}] exit handler of rank {rank} in its process: True\n" in ended.out
            assert f"[rank {rank}] finalizer of rank {rank}\n" in ended.out
            assert f"held back until the end by rank {rank}\n" in ended.out
    for ranks in facts.values():
        assert [each["same"] for each in ranks] == [ranks[0]["same"]] * 2
        for name in ranks[0]["distinct"]:
            assert len({json.dumps(each["distinct"][name]) for each in ranks}) == 2, name
    assert facts["forked"][0]["same"] == facts["fresh"][0]["same"]
    found = facts["forked"][0]["same"]
    assert (found["execution"], found["SIGTERM"], found["misread"], found["answered wrong"]) == (
        "f0123",
        ["SIGTERM"],
        0,
        0,
    )
    assert (found["children's groups"], found["the ranks' group"], found["replicas guarded"]) == (2, 2, True)
