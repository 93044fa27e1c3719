"""The image that the Dockerfile builds: it trains, and holds nothing that it does not need for that."""

from __future__ import annotations

import pytest

from tests.containers.conftest import Run
from tests.containers.engine import Docker, Options

SIZE_LIMIT_MB = 2200
"""A ceiling that torch's growth will not touch, but a compiler or a second torch in a layer will."""


@pytest.fixture(scope="module")
def inspected(docker: Docker, image: str) -> dict[str, object]:
    found: dict[str, object] = docker.client.images.get(image).attrs
    return found


def test_it_is_not_root_and_cannot_change_what_is_installed(
    run_in_image: Run, inspected: dict[str, dict[str, object]]
) -> None:
    assert inspected["Config"]["User"] == "1000:1000"  # a number: Kubernetes' runAsNonRoot cannot look names up
    done = run_in_image(
        "sh", "-c", "id -u; touch /opt/venv/x; touch /x; touch ./mine && echo its own directory is writable"
    )
    assert done.stdout.splitlines() == ["1000", "its own directory is writable"]
    assert done.stderr.count("Permission denied") == 2


def test_code_goes_where_pyflyte_registers_it_to_by_default(run_in_image: Run) -> None:
    stage = "safedist-execute --additional-distribution /tmp/code.tar.gz --dest-dir /root"
    steps = (
        "mkdir /tmp/code && echo 'print(__file__)' >/tmp/code/acme.py",
        "tar -czf /tmp/code.tar.gz -C /tmp/code acme.py",
        f"{stage} -- python -c 'import acme, os; print(os.getuid())'",
    )
    done = run_in_image("sh", "-ec", "\n".join(steps))
    assert (done.returncode, done.stdout.splitlines()) == (0, ["/root/acme.py", "1000"]), done.stderr


def test_no_compiler_and_no_build_tool_is_inside(run_in_image: Run) -> None:
    tools = "gcc g++ cc c++ clang cpp ld as make cmake ninja nvcc"
    done = run_in_image(
        "sh", "-c", f"for tool in {tools}; do command -v $tool; done; find / -name 'cc1*' -type f 2>/dev/null"
    )
    assert done.stdout == ""


def test_the_machines_pip_settings_stay_out_of_it(docker: Docker, image: str, run_in_image: Run) -> None:
    left = run_in_image("sh", "-c", "find /etc/pip.conf /run/secrets /wheels -type f -size +0")
    assert left.stdout == ""  # the mount points stay, empty
    steps = [step["CreatedBy"] for step in docker.client.images.get(image).history()]
    assert any("pip install" in step for step in steps)
    assert not any("index-url" in step for step in steps)


def test_the_package_and_its_commands_are_installed(run_in_image: Run) -> None:
    code = (
        "import importlib.metadata as m, flytekitplugins_safedist as p, shutil\n"
        "print(m.version('flytekitplugins-safedist'), '/site-packages/' in p.__file__)\n"
        "print([e.value for e in m.entry_points(group='flytekit.plugins') if e.name == 'safedist'])\n"
        "print(*[n for n in ('safedist-execute', 'safedist', 'pyflyte-execute') if shutil.which(n) is None])"
    )
    done = run_in_image("python", "-c", code)
    assert done.stdout.splitlines() == ["0.1.0 True", "['flytekitplugins_safedist']", ""], done.stderr


def test_its_torch_is_a_cpu_build_that_knows_numpy_and_horovod_imports(run_in_image: Run) -> None:
    code = "import horovod.torch, torch; print(torch.version.cuda, torch.zeros(2).numpy().sum())"
    done = run_in_image("python", "-c", code)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "None 0.0", "")


def test_the_containers_limit_is_read_and_the_kernels_killer_is_counted(run_in_image: Run) -> None:
    code = (
        "import subprocess, sys\n"
        "from flytekitplugins_safedist.agent import memory\n"
        "before = memory.cgroup()\n"
        "greedy = subprocess.run([sys.executable, '-c', 'held = b\"x\" * (1 << 30)'])\n"
        "after = memory.cgroup()\n"
        "print(before.limit, 0 < before.in_use < before.limit, greedy.returncode, memory.killed(after, before))\n"
        "print(memory.told(after, before, {0: 1 << 30}).count('half as much again: requests=Resources(mem=\"1Gi\"'))\n"
    )
    limit = Options(more={"mem_limit": "256m", "memswap_limit": "256m"})
    done = run_in_image("python", "-c", code, options=limit)
    assert done.stdout.split() == [str(256 << 20), "True", "-9", "1", "1"], done.stderr


def test_its_size_stays_below_the_ceiling(inspected: dict[str, int]) -> None:
    assert inspected["Size"] / 1e6 < SIZE_LIMIT_MB
