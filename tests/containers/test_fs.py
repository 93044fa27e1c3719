"""The helpers for shared file systems, on two nodes that share a volume, and have another one each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from docker.types import Mount

from tests.containers.cluster import Job
from tests.containers.engine import Docker, Options


@pytest.fixture
def volume(docker: Docker, image: str) -> Iterator[Callable[[str], Options]]:
    """Make docker volumes that the image's user may write; each as options of a container."""
    made: list[Any] = []

    def make(mounted: str) -> Options:
        made.append(docker.client.volumes.create(labels=docker.labels))
        option = Options(mounts=(Mount(mounted, made[-1].name),))
        given = docker.once(image, ("chown", "1000:1000", mounted), option + Options(more={"user": "0"}))
        assert given.returncode == 0, given.stderr
        return option

    yield make
    for one in made:
        one.remove(force=True)


def test_a_volume_of_both_nodes_is_filled_once_and_one_of_each_node_on_both(
    volume: Callable[[str], Options], job: Callable[..., Job]
) -> None:
    running = job("places", options=volume("/mnt/shared"))
    for pod in running.pods:
        pod.options += volume("/mnt/own")
    ended = running.run()
    assert [pod.code for pod in ended] == [0, 0]
    assert running.uploaded == ["outputs.pb"]
    found: list[dict[str, Any]] = running.output
    assert [one["rank"] for one in found] == [0, 1, 2, 3]
    # Before, and without, the backend's own init.
    assert [one["node_by"] // 2 for one in found] == [0, 0, 1, 1]
    assert found[0]["node_by"] == found[1]["node_by"]
    assert found[2]["node_by"] == found[3]["node_by"]
    assert len({one["job_by"] for one in found}) == 1
    assert [one["first"] for one in found] == [True, False, True, False]
    assert len({one["fetched_from"]["shared"] for one in found}) == 1
    assert [one["fetched_from"]["own"] for one in found] == [0, 0, 1, 1]
