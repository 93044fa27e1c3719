"""Random trainings: a model, an optimizer, a way to wrap and to shard them as they are saved, and another one as they
are restored. What each rank does of a list of them, and what must come of it.

The ranks have one batch, so every way to share the work out comes to the gradients of a single process.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from flytekitplugins_safedist.checkpoint import Checkpoints
from tests.checkpoint.saving import reach_stores

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.5
    from torch.distributed._composable.fsdp import fully_shard

KINDS = {
    1: ("plain", "plain", "fsdp2"),
    2: ("ddp", "fsdp2", "fsdp1", "tp"),
    3: ("ddp", "fsdp2", "fsdp1"),
    4: ("ddp", "fsdp2", "fsdp1", "hsdp", "2d"),
}
OPTIMIZERS = ("sgd", "momentum", "adam", "amsgrad", "adagrad", "rmsprop", "adamax", "nadam", "plain numbers", "moves")
DIGITS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}
STEPS = 3


@dataclass(frozen=True)
class Way:
    """How a training is run.

    Attributes:
        world_size: ranks.
        kind: how they share the model.
        wrapped: the blocks that are sharded by themselves, or wrapped.
        by: what else is around blocks: "compile", "checkpoint", or "".
        backwards: whether the optimizer has its parameters in another order, and its groups.
        orig: FSDP1's ``use_orig_params``.
    """

    world_size: int
    kind: str
    wrapped: tuple[int, ...]
    by: str
    backwards: bool
    orig: bool


@dataclass(frozen=True)
class Case:
    """One training, drawn from its seed: the same whatever ran before. Its saves are in a directory, or in a store."""

    number: int
    seed: int
    width: int
    blocks: int
    shared: bool
    tied: bool
    scalar: bool
    frozen: bool
    unused: bool
    dtype: torch.dtype
    optimizer: str
    groups: int
    steps: int
    saved: Way
    restored: Way
    store: str = ""


def drawn(seed: int, number: int) -> Case:
    die = random.Random(f"{seed}/{number}")
    blocks = die.randint(2, 4)
    ways = [_way(die, blocks) for _ in range(2)]
    kinds = {way.kind for way in ways}
    is_sharded = bool(kinds - {"plain", "ddp", "tp"})
    # torch's FSDP1 knows states of its parameters' type and size, and numbers; with others its own functions fail.
    optimizers = [name for name in OPTIMIZERS if "fsdp1" not in kinds or name not in ("nadam", "plain numbers")]
    return Case(
        number=number,
        seed=die.randrange(1 << 30),
        width=die.choice([7, 9, 13]),
        blocks=blocks,
        shared=die.random() < 0.3 and not is_sharded,
        tied=die.random() < 0.3,
        scalar=die.random() < 0.5 and not is_sharded,
        frozen=die.random() < 0.3 and all(way.orig for way in ways if way.kind == "fsdp1"),
        # FSDP1 cannot load a state of some parameters of one unit alone.
        unused=die.random() < 0.3 and "ddp" not in kinds and all(way.wrapped for way in ways if way.kind == "fsdp1"),
        dtype=die.choice([torch.float64, torch.float64, torch.float32, torch.bfloat16]),
        optimizer=die.choice(optimizers),
        groups=1 if "fsdp1" in kinds else die.choice([1, 2]),
        steps=die.choice([0, 1, 2, 2, 3]),
        saved=ways[0],
        restored=ways[1],
    )


def _way(die: random.Random, blocks: int) -> Way:
    count = die.choice([1, 2, 2, 3, 4])
    return Way(
        world_size=count,
        kind=die.choice(KINDS[count]),
        wrapped=tuple(index for index in range(blocks) if die.random() < 0.5),
        by=die.choice(["", "", "compile", "checkpoint"]),
        backwards=die.random() < 0.5,
        orig=die.random() < 0.5,
    )


# --- what is trained --------------------------------------------------------------------------------------------------
class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, width + 4), torch.nn.Linear(width + 4, width, bias=False)

    def forward(self, x: Any) -> Any:
        return x + self.down(self.up(x).tanh())


class Net(torch.nn.Module):
    """Some blocks, and parameters of the root's own."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.first = torch.nn.Linear(case.width, case.width)
        self.blocks = torch.nn.ModuleList(Block(case.width) for _ in range(case.blocks))
        if case.shared:
            self.blocks[1] = self.blocks[0]
        self.norm = torch.nn.LayerNorm(case.width)
        self.scale = torch.nn.Parameter(torch.ones(()) if case.scalar else torch.ones(case.width))
        self.last = torch.nn.Linear(case.width, case.width, bias=False)
        if case.tied:
            self.last.weight = self.first.weight
        self.unused = Block(case.width) if case.unused else None
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.told: Any = None
        if case.frozen:
            self.norm.weight.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        self.count += 1
        return self.last(self.norm(x) * self.scale)

    def get_extra_state(self) -> Any:
        return {"told": self.told, "pair": (1, [2.0])}

    def set_extra_state(self, state: Any) -> None:
        self.told = state["told"]


class Numbers(torch.optim.Optimizer):
    """Keeps numbers beside its tensors, and tensors that are not as its parameters are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    held = self.state[parameter]
                    held["count"] = held.get("count", 0) + 1
                    held["mean"] = held.get("mean", torch.zeros_like(parameter)).lerp(parameter.grad, 0.3)
                    held["of"] = {"halves": torch.full((2,), held["count"] / 2)}
                    parameter.sub_(held["mean"] * (group["lr"] / held["count"]))


class Moves(torch.optim.Adam):
    """Moves its parameters also where lr is 0."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.99)


class Forgets(torch.optim.Adam):
    """Loads another thing than it was given."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        for held in self.state.values():
            held["exp_avg"] = held["exp_avg"].to(torch.bfloat16).to(held["exp_avg"].dtype)


def _optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    makers: dict[str, Any] = {
        "sgd": lambda: torch.optim.SGD(groups, lr=1e-2),
        "momentum": lambda: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
        "adam": lambda: torch.optim.AdamW(groups, lr=1e-2),
        "amsgrad": lambda: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
        "adagrad": lambda: torch.optim.Adagrad(groups, lr=1e-2),
        "rmsprop": lambda: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.5, centered=True),
        "adamax": lambda: torch.optim.Adamax(groups, lr=1e-2),
        "nadam": lambda: torch.optim.NAdam(groups, lr=1e-2),
        "plain numbers": lambda: Numbers(groups),
        "moves": lambda: Moves(groups, lr=1e-2),
        "forgets": lambda: Forgets(groups, lr=1e-2),
    }
    made: torch.optim.Optimizer = makers[name]()
    return made


def _shared(model: Net, case: Case, way: Way) -> torch.nn.Module:
    """The model as the ranks share it."""
    count = way.world_size
    if way.kind == "ddp":
        return DistributedDataParallel(model, broadcast_buffers=case.number % 2 == 0)
    if way.kind == "fsdp1":
        policy = ModuleWrapPolicy({Block}) if way.wrapped else None
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=cpu, use_orig_params=way.orig)
    mesh = init_device_mesh("cpu", (count,))
    if way.kind in ("tp", "2d"):
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if way.kind == "2d" else None
        plan = {f"blocks.{index}.up": ColwiseParallel(output_layouts=Replicate()) for index in way.wrapped}
        parallelize_module(model, both["tp"] if both is not None else mesh, plan)
        if both is None:
            return model
        mesh = both["dp"]
    if way.kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if way.kind in ("fsdp2", "hsdp", "2d"):
        for index in way.wrapped:
            fully_shard(model.blocks[index], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def _compiled(module: torch.nn.Module) -> Any:
    """With what torch.compile does to names; a backend of torch's own takes each rank seconds to import."""
    return torch.compile(module, backend=lambda graph, _: graph)


def built(case: Case, way: Way, optimizer: str = "") -> tuple[Any, Any]:
    torch.manual_seed(case.seed)
    model = Net(case).to(case.dtype)
    if way.by and way.kind != "fsdp1":
        wrap = _compiled if way.by == "compile" else checkpoint_wrapper
        whole = [way.wrapped] if not case.shared else []
        for index in [index for some in whole for index in some]:
            if way.kind not in ("tp", "2d"):
                model.blocks[index] = wrap(model.blocks[index])
    shared = _shared(model, case, way)
    if way.by == "compile" and way.kind == "plain":
        shared = _compiled(shared)
    parameters = [each for each in shared.parameters() if each.requires_grad]
    halves = [parameters] if case.groups == 1 else [parameters[::2], parameters[1::2]]
    if case.frozen:
        halves[0] += [each for each in shared.parameters() if not each.requires_grad]
    groups = [
        {"params": half[::-1] if way.backwards else half, "weight_decay": 0.01 * n} for n, half in enumerate(halves)
    ]
    return shared, _optimizer(optimizer or case.optimizer, groups[::-1] if way.backwards else groups)


def step(case: Case, model: Any, optimizer: Any, number: int) -> float:
    x = torch.randn(6, case.width, generator=torch.Generator().manual_seed(case.seed + number)).to(case.dtype)
    optimizer.zero_grad()
    loss = (model(x) - x.roll(1, 1)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss)


def whole(model: Any, optimizer: Any) -> dict[str, Any]:
    """All that a model and its optimizer hold, by name and to the last bit, by torch's own functions."""
    options = torchs.StateDictOptions(full_state_dict=True)
    held = {"model": torchs.get_model_state_dict(model, options=options)}
    if optimizer.state:
        of_optimizer = torchs.get_optimizer_state_dict(model, optimizer, options=options)
        held["state"] = of_optimizer["state"]
        held["groups"] = {
            ",".join(sorted(group.pop("params"))): dict(sorted(group.items())) for group in of_optimizer["param_groups"]
        }
    return copy.deepcopy(held)  # some are live


# --- what each rank does ----------------------------------------------------------------------------------------------
def begin() -> None:
    reach_stores()
    warnings.simplefilter("ignore")
    torch._dynamo.config.disable = True  # what torch.compile does to names is tried, not to code
    dist.init_process_group("gloo")


def save_all(directory: Path, cases: Sequence[Case]) -> None:
    begin()
    for case in cases:
        model, optimizer = built(case, case.saved)
        for number in range(case.steps):
            step(case, model, optimizer, number)
        place = directory / str(case.number)
        place.mkdir(exist_ok=True)
        with Checkpoints(case.store or place / "saves", every=None) as ckpt:
            ckpt.save(case.steps, new_state(model, optimizer, case.number), force=True)
        held = whole(model, optimizer)
        losses = [step(case, model, optimizer, case.steps + number) for number in range(STEPS)]
        if dist.get_rank() == 0:
            torch.save((held, losses), place / "unbroken")
    dist.barrier()


def new_state(model: Any, optimizer: Any, number: int) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer, "case": number, "kept": torch.full((3,), float(number))}


def restore_all(directory: Path, cases: Sequence[Case]) -> dict[int, str]:
    """By its number, what is wrong with each case: nothing, mostly."""
    begin()
    wrong = {case.number: _restored(directory / str(case.number), case) for case in cases}
    dist.barrier()
    return wrong


def _restored(place: Path, case: Case) -> str:
    model, optimizer = built(case, case.restored)
    state = new_state(model, optimizer, -1)
    try:
        first = Checkpoints(case.store or place / "saves").restore(state)
    except Exception as error:  # the other ranks have it, too
        return f"{case}: {type(error).__name__}: {error}"
    expected, losses = torch.load(place / "unbroken", weights_only=False)
    held = whole(model, optimizer)
    same = first == case.steps + 1 and state["case"] == case.number and state["kept"].eq(case.number).all()
    if not same or not _same(held, expected):
        return f"{case}: restored {_different(held, expected)}"
    found = [step(case, model, optimizer, case.steps + number) for number in range(STEPS)]
    close = all(abs(a - b) <= DIGITS[case.dtype] * max(1.0, abs(b)) for a, b in zip(found, losses, strict=True))
    return "" if close else f"{case}: losses {found}, unbroken {losses}"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return repr(one) == repr(other)


def _different(one: Any, other: Any, name: str = "") -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{name}: {one.keys() ^ other.keys()}"
        return "; ".join(filter(None, (_different(one[key], other[key], f"{name}.{key}") for key in one)))
    return "" if _same(one, other) else f"{name}: {one}, not {other}"[:300]
