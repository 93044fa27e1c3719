"""What a task config may say: defaults are decided once, and everything wrong is reported at once."""

from __future__ import annotations

import dataclasses
import pickle
import types
from typing import Any, ClassVar, Generic, TypeVar

import pytest
from flytekit import Resources, task
from hypothesis import given
from hypothesis import strategies as st

from flytekitplugins_safedist.config.caches import CACHE_NAMES
from flytekitplugins_safedist.config.options import (
    Logs,
    SafeDistributed,
    SafeHorovod,
    SafeTorch,
    Scratch,
    Timeouts,
    parse_nodes,
)
from flytekitplugins_safedist.errors import ConfigError
from flytekitplugins_safedist.plugin.serialization import plan_task
from flytekitplugins_safedist.plugin.task import SafeTask
from tests.unit.config.plans import planned

CACHES_LISTED = ", ".join(sorted(CACHE_NAMES))


def refused(config: SafeDistributed, *, dynamic: bool = False, **arguments: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan_task(config, arguments, where={}, function=refused, dynamic=dynamic)
    return caught.value


def gpus(count: int | None) -> dict[str, Any]:
    return {} if count is None else {"requests": Resources(gpu=str(count))}


# --- what is accepted ------------------------------------------------------------------------------------------------
def test_defaults_are_one_node_and_one_rank() -> None:
    settings = planned(SafeTorch())
    assert (settings.backend, settings.min_nodes, settings.max_nodes, settings.nproc_per_node) == ("torch", 1, 1, 1)
    assert (settings.max_restarts, settings.start_method, settings.size_limit) == (0, "preload", None)
    assert settings.world_size == 1
    assert settings.environment == ()


@pytest.mark.parametrize(("count", "ranks"), [(None, 1), (0, 1), (1, 1), (8, 8)])
def test_ranks_per_node_default_to_the_gpus_that_the_task_requests(count: int | None, ranks: int) -> None:
    assert planned(SafeHorovod(), **gpus(count)).nproc_per_node == ranks


def test_fewer_ranks_than_gpus_are_allowed_and_cpu_tasks_may_have_any_number() -> None:
    assert planned(SafeHorovod(nproc_per_node=2), **gpus(8)).nproc_per_node == 2
    assert planned(SafeHorovod(nproc_per_node=16)).nproc_per_node == 16
    assert planned(SafeHorovod(nproc_per_node=16), **gpus(0)).nproc_per_node == 16


def test_the_backend_follows_from_the_config_class_of_the_user_and_its_subclasses() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(SafeHorovod):
        pass

    assert planned(Mine()).backend == "horovod"
    assert planned(SafeTorch()).backend == "torch"


class Team:
    """What a team puts into its configs, and has made of each."""

    configs: ClassVar[list[str]] = []

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Team.configs.append(cls.__name__)


@pytest.mark.parametrize("bases", [(SafeTorch,), (Team, SafeTorch), (Generic[TypeVar("T")], SafeTorch)])
def test_a_task_of_a_users_own_config_runs_ranks_wherever_ours_stands_among_its_bases(bases: tuple[Any, ...]) -> None:
    Team.configs.clear()
    made = dataclasses.dataclass(frozen=True, kw_only=True)
    first = made(types.new_class("First", bases))
    second = made(types.new_class("Second", (type("Mixin", (), {}), first)))
    for config in (first, second):
        assert isinstance(task(task_config=config(nproc_per_node=2))(a_function), SafeTask)
    assert ("Second" in Team.configs) == (Team in bases)


def a_function() -> None: ...


def test_every_word_of_the_user_reaches_the_resolved_settings() -> None:
    config = SafeHorovod(
        nnodes="2:4",
        nproc_per_node=3,
        max_restarts=5,
        start_method="spawn",
        scratch=Scratch(path="/scratch", keep="on_failure", size_limit="1.5Gi", shared_caches=("triton",)),
        timeouts=Timeouts(start=1, rendezvous=2.5, stop=3, exit=4),
        logs=Logs(show=(0, 2), tail_lines=0, prefix="{node_rank}/{local_rank} "),
    )
    settings = planned(config, **gpus(4), environment={"B": "2", "A": "1"})
    assert (settings.min_nodes, settings.max_nodes, settings.nproc_per_node, settings.world_size) == (2, 4, 3, 12)
    assert (settings.max_restarts, settings.start_method) == (5, "spawn")
    assert (settings.scratch, settings.size_limit) == (config.scratch, 3 * 512 * 1024 * 1024)
    assert (settings.timeouts, settings.logs) == (config.timeouts, config.logs)
    assert settings.environment == (("A", "1"), ("B", "2"))
    assert pickle.loads(pickle.dumps(settings)) == settings


@pytest.mark.parametrize("config", [SafeHorovod(), Scratch(), Timeouts(), Logs()])
def test_configs_are_frozen_and_hashable(config: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(config)[0].name, None)
    assert hash(config) == hash(dataclasses.replace(config))


def test_configs_take_their_fields_by_name_only_so_that_fields_can_be_added() -> None:
    classes: list[Any] = [SafeHorovod, SafeTorch, Scratch, Timeouts, Logs]
    for cls in classes:
        with pytest.raises(TypeError):
            cls(1)


# --- what is refused, word for word ----------------------------------------------------------------------------------
# What users write need not be what the types allow: these say nothing to a type checker.
A_SCRATCH: Any = Scratch
A_TIMEOUTS: Any = Timeouts
SOME_LOGS: Any = Logs

A_RANGE: Any = range(3)
SHOWN_OF_TWO = "logs.show={} names a rank that is not there: 2 in all (use 0 to 1)"
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        (
            {"nproc_per_node": value},
            f"nproc_per_node={value!r} is not a number of ranks (use 1 or more, or None for one rank per GPU)",
        )
        for value in (0, -1, "eight", "8", 2.0, True, [1])
    ),
    *(
        (
            {"nnodes": value},
            f'nnodes={value!r} is not a number of nodes (use 1, a number N of up to 999999, or a range such as "2:4")',
        )
        for value in (0, -2, "0", "4:2", "2:", ":2", "two", "1:2:3", "", " 1", 1.0, True, None, (1, 2), "٣")
    ),
    *(
        ({"max_restarts": value}, f"max_restarts={value!r} is not a number of restarts (use 0 or more)")
        for value in (-1, "3", 1.5, None, False)
    ),
    *(
        ({"start_method": value}, f"start_method={value!r} is unknown (use one of: 'preload', 'spawn')")
        for value in ("fork", "", None, "Spawn", ["spawn"])
    ),
    ({"scratch": "/tmp"}, "scratch='/tmp' is not a Scratch (use Scratch(path=..., keep=..., size_limit=...))"),
    *(
        (
            {"scratch": A_SCRATCH(path=value)},
            f"scratch.path={value!r} is not an absolute path (use one that exists in the task's pod)",
        )
        for value in ("scratch", "", "./x", "~/x", 3, b"/x", "/a\0b", "/\ud800")
    ),
    *(
        (
            {"scratch": A_SCRATCH(keep=value)},
            f"scratch.keep={value!r} is unknown (use one of: 'never', 'on_failure', 'always')",
        )
        for value in ("sometimes", True, None)
    ),
    *(
        (
            {"scratch": A_SCRATCH(size_limit=value)},
            f'scratch.size_limit={value!r} is not a size (use bytes or a quantity such as "20Gi")',
        )
        for value in (0, -1, "20 GB", "20gi", "lots", "-1Gi", "1e400", "", 1.5, True, "9" * 400, "0Gi")
    ),
    (
        {"scratch": A_SCRATCH(shared_caches="triton")},
        "scratch.shared_caches='triton' is not a list of names (use (\"triton\",))",
    ),
    (
        {"scratch": A_SCRATCH(shared_caches=7)},
        'scratch.shared_caches=7 is not a list of names (use ("triton",))',
    ),
    *(
        (
            {"scratch": A_SCRATCH(shared_caches=("triton", value))},
            f"scratch.shared_caches={('triton', value)!r} has a name that is unknown (known are {CACHES_LISTED})",
        )
        for value in ("tritn", None, ["triton"])
    ),
    (
        {"timeouts": 60},
        "timeouts=60 is not a Timeouts (use Timeouts(code=..., start=..., rendezvous=...))",
    ),
    *(
        (
            {"timeouts": A_TIMEOUTS(**{name: value})},
            f"timeouts.{name}={value!r} is not a time to wait (use seconds, more than 0)",
        )
        for name in ("start", "rendezvous", "stop", "exit", "upload")
        for value in (0, -1.5, float("inf"), float("nan"), "60", True, None)
    ),
    (
        {"timeouts": Timeouts(rendezvous=1e10)},
        "timeouts.rendezvous=10000000000.0 is longer than the kernel can wait at once (use at most 2147483 s, about "
        "24 days)",
    ),
    ({"logs": "all"}, "logs='all' is not a Logs (use Logs(show=..., tail_lines=..., prefix=...))"),
    *(
        (
            {"logs": SOME_LOGS(show=value)},
            f"logs.show={value!r} is not a list of ranks (use ranks such as (0,), or None for all)",
        )
        for value in (0, "0", (-1,), ("0",), (True,), {0: 1}, range(-1, 2), range(10**12))
    ),
    *(
        ({"logs": SOME_LOGS(tail_lines=value)}, f"logs.tail_lines={value!r} is not a number of lines (use 0 or more)")
        for value in (-1, "20", None, 2.0)
    ),
    *(
        (
            {"logs": SOME_LOGS(prefix=value)},
            f"logs.prefix={value!r} cannot be filled in (use {{rank}}, {{local_rank}}, {{node_rank}})",
        )
        for value in (
            "{host} ",
            "{0}",
            "{",
            "{rank:zz}",
            "{rank[0]}",
            "{rank.x}",
            "{rank:>1000000000}",
            "{rank:{rank}}",
            None,
            5,
        )
    ),
    (
        {"nnodes": 10, "max_replacements": 300_000_000},
        "max_replacements=300000000 with 10 nodes is more restarts of pods than an operator can count "
        "(lower it to 214748363)",
    ),
    ({"nproc_per_node": 2, "logs": Logs(show=(0, 5))}, SHOWN_OF_TWO.format("(0, 5)")),
    ({"nproc_per_node": 1, "nnodes": "1:2", "logs": Logs(show=A_RANGE)}, SHOWN_OF_TWO.format("range(0, 3)")),
]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"nnodes": 10**5000}, "nnodes"),
        ({"max_restarts": 10**5000}, "max_restarts"),
        ({"scratch": Scratch(size_limit=10**5000)}, "scratch.size_limit"),
        ({"scratch": Scratch(size_limit="9" * 5000)}, "scratch.size_limit"),
    ],
)
def test_a_number_too_long_for_python_to_print_is_refused_in_a_line_that_can_be_read(
    fields: dict[str, Any], field: str
) -> None:
    error = refused(SafeTorch(**fields))
    assert [problem.field for problem in error.problems] == [field]
    assert len(str(error)) < 700


def test_a_value_that_cannot_be_shown_is_refused_all_the_same() -> None:
    class Hidden:
        def __repr__(self) -> str:
            raise RuntimeError("not shown")

    assert str(refused(SafeTorch(logs=Hidden()))).startswith("1 problem: logs=<Hidden> is not a Logs")  # type: ignore[arg-type]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[message[:60] for _, message in REFUSED])
def test_a_value_that_cannot_work_is_refused_with_field_value_and_repair(fields: dict[str, Any], message: str) -> None:
    error = refused(SafeTorch(**fields))
    assert str(error) == f"1 problem: {message}"
    assert len(error.problems) == 1


def test_more_ranks_than_gpus_are_refused_naming_the_field_that_says_so() -> None:
    assert str(refused(SafeHorovod(nproc_per_node=8), **gpus(4))) == (
        "1 problem: nproc_per_node=8 exceeds requests.gpu=4 (lower it to 4 or request 8 GPUs)"
    )
    assert str(refused(SafeHorovod(nproc_per_node=2), resources=Resources(gpu="1"))) == (
        "1 problem: nproc_per_node=2 exceeds resources.gpu=1 (lower it to 1 or request 2 GPUs)"
    )


def test_a_dynamic_workflow_has_no_ranks() -> None:
    assert str(refused(SafeTorch(), dynamic=True)) == (
        "1 problem: task_config='SafeTorch' is on a @dynamic workflow, which has no ranks (use @task)"
    )


def test_the_common_base_names_no_backend() -> None:
    assert str(refused(SafeDistributed())) == (
        "1 problem: task_config='SafeDistributed' does not name a backend (use SafeHorovod(...) or SafeTorch(...))"
    )


def test_everything_wrong_is_reported_at_once_with_the_task_and_what_others_found() -> None:
    config = SafeHorovod(
        nnodes="x",
        nproc_per_node=8,
        max_restarts=-1,
        start_method="fork",  # type: ignore[arg-type]
        scratch=Scratch(path="a", keep="b", size_limit="c", shared_caches=("d", "e")),  # type: ignore[arg-type]
        timeouts=Timeouts(start=0, rendezvous=0, stop=0, exit=0),
        logs=Logs(show=(-1,), tail_lines=-1, prefix="{"),
    )
    with pytest.raises(ConfigError) as caught:
        plan_task(config, gpus(4), where={"task": "wf.train"}, function=refused, dynamic=True)
    error = caught.value
    assert [problem.field for problem in error.problems] == [
        "nnodes",
        "max_restarts",
        "start_method",
        "scratch.path",
        "scratch.keep",
        "scratch.size_limit",
        "scratch.shared_caches",
        "timeouts.start",
        "timeouts.rendezvous",
        "timeouts.stop",
        "timeouts.exit",
        "logs.show",
        "logs.tail_lines",
        "logs.prefix",
        "nproc_per_node",
        "task_config",
    ]
    assert str(error).startswith("16 problems: nnodes='x' is not a number of nodes")
    assert str(error).endswith("is on a @dynamic workflow, which has no ranks (use @task) [task=wf.train]")


# --- parsers ----------------------------------------------------------------------------------------------------
@given(st.integers(1, 999_999), st.integers(0, 999_999))
def test_a_range_of_nodes_is_read_when_it_goes_upwards(low: int, further: int) -> None:
    high = min(low + further, 999_999)
    assert parse_nodes(f"{low}:{high}") == (low, high)
    assert parse_nodes(low) == parse_nodes(str(low)) == (low, low)
    if high > low:
        assert parse_nodes(f"{high}:{low}") is None


@given(st.one_of(st.text(alphabet="0123456789:-+ ٣\n"), st.text(), st.integers(), st.floats(), st.none()))
def test_anything_is_either_a_range_of_nodes_or_not_and_never_a_crash(value: object) -> None:
    nodes = parse_nodes(value)
    assert nodes is None or 1 <= nodes[0] <= nodes[1]
