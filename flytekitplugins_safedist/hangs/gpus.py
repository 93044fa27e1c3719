"""The GPUs of a node, as NVIDIA's library tells of them (NVML, by the package ``nvidia-ml-py``): how they are used, and
what has failed in them. Any user of a pod may ask it; where the package or the driver is not there, there are none.

A thread asks it: a driver whose GPU is lost may take its time to answer, and nobody waits for that for long.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Between two looks; one that is asked for is made at once."""

ANSWER_SECONDS = 1.0
"""For a look that is asked for."""

_MOST_FAULTS, _MOST_EVENTS = 64, 256

# Numbers and names: NVIDIA's catalog (docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors with the Xid Catalog").
# Whose they are: as Flyte 2 has it (flyte#7879, the package gpufault; typed in flyte#7878 and flyte-sdk#1524). What is
# not in this table (most are the driver's notes on others, or want decoding) changes nothing, and is only told.
_USER = "USER:GpuXidError"
_BUS, _ECC, _NVLINK, _OTHER = (f"SYSTEM:Gpu{name}" for name in ("FallenOffBus", "EccError", "NvlinkError", "XidError"))
XIDS = {
    13: (_USER, "graphics engine exception (an illegal instruction or address)"),
    31: (_USER, "GPU memory page fault (an illegal address)"),
    43: (_USER, "GPU stopped processing, after an error of the program's"),
    45: (_USER, "clean-up after an earlier error"),
    46: (_OTHER, "GPU stopped processing"),
    48: (_ECC, "double-bit ECC error"),
    54: (_OTHER, "auxiliary power is not connected"),
    62: (_OTHER, "internal micro-controller halt"),
    63: (_ECC, "memory row was remapped, or a page retired"),
    64: (_ECC, "memory row could not be remapped, or a page not retired"),
    74: (_NVLINK, "NVLink error"),
    79: (_BUS, "GPU has fallen off the bus"),
    94: (_ECC, "contained memory error"),
    95: (_ECC, "uncontained memory error"),
    109: (_OTHER, "context switch timeout"),
    110: (_OTHER, "security fault"),
    119: (_OTHER, "GSP RPC timeout"),
    120: (_OTHER, "GSP error"),
    136: (_NVLINK, "link training failed"),
    140: (_ECC, "unrecovered ECC error"),
    143: (_OTHER, "GPU initialization error"),
    158: (_OTHER, "GPU fatal timeout"),
}
_OFF_THE_BUS = 79
_OF_AN_END = 45
"""What the driver reports when a program with work on the GPU is ended, too, whatever ended it."""
_MENDED_BY_A_RESTART = (63, 94)
"""All other hardware's need a reset of the GPU, or more: no restart in place helps."""

_SLOWED = {0x20: "its temperature", 0x40: "its temperature (hardware)", 0x80: "its power supply"}
"""nvmlClocksEventReason...: SwThermalSlowdown, HwThermalSlowdown, HwPowerBrakeSlowdown."""

_FACTS: dict[str, Callable[[Any, Any], Any]] = {
    "busy": lambda nvml, gpu: int(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
    "memory": lambda nvml, gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu).used),
    "memory_total": lambda nvml, gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu).total),
    "temperature": lambda nvml, gpu: int(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
    "slowed": lambda nvml, gpu: _slowed(int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))),
}
"""Of :class:`GpuUse`: how the driver is asked."""


@dataclass(frozen=True)
class GpuUse:
    """One GPU at one moment. None for what it does not tell.

    Attributes:
        index: as nvidia-smi shows it in this pod.
        uuid: as nvidia-smi shows it on any.
        busy: percent of the last second or so in which a kernel ran.
        memory, memory_total: bytes, of all processes.
        temperature: in degrees Celsius.
        slowed: why its clocks are lowered; "" where they are not.
    """

    index: int
    uuid: str
    busy: int | None = None
    memory: int | None = None
    memory_total: int | None = None
    temperature: int | None = None
    slowed: str = ""

    def __str__(self) -> str:
        """For people."""
        facts = [] if self.busy is None else [f"{self.busy}% busy"]
        if self.memory is not None and self.memory_total is not None:
            facts.append(f"{self.memory / 2**30:.1f} of {self.memory_total / 2**30:.1f} GiB in use")
        facts += [] if self.temperature is None else [f"{self.temperature} °C"]
        facts += [f"slowed for {self.slowed}"] if self.slowed else []
        return f"GPU {self.index} ({self.uuid}): {', '.join(facts) or 'it says nothing'}"


@dataclass(frozen=True)
class GpuFault:
    """Something that a GPU has reported.

    Attributes:
        index, uuid: which GPU, as in :class:`GpuUse`; -1 and "" where nobody knows.
        what: in words, with the Xid's number.
        code: of a failure that comes with it; "" where it says nothing of that.
        time_ns: when it was seen, in nanoseconds since the epoch.
        stays: until the GPU is reset, at least.
        xid: its number.
    """

    index: int
    uuid: str
    what: str
    code: str
    time_ns: int
    stays: bool = False
    xid: int = 0

    @property
    def is_hardware(self) -> bool:
        """No program causes it."""
        return self.code.startswith("SYSTEM:")

    @property
    def lasts(self) -> bool:
        """Whether what happens much later may come of it: a row of memory that was remapped goes on as if nothing had
        been."""
        return self.stays or not self.is_hardware

    @property
    def is_gone(self) -> bool:
        """Whether nothing works on this GPU any more."""
        return self.xid == _OFF_THE_BUS

    @property
    def gpu(self) -> str:
        """Which one, for a sentence."""
        return f"GPU {self.index} ({self.uuid})" if self.index >= 0 else "a GPU"

    def __str__(self) -> str:
        """For people."""
        return f"{self.gpu} reported {self.what}"


def fault_of(xid: int, gpu: GpuUse, time_ns: int) -> GpuFault:
    """What an Xid of a GPU means."""
    code, name = XIDS.get(xid, ("", ""))
    stays = code not in ("", _USER) and xid not in _MENDED_BY_A_RESTART
    return GpuFault(gpu.index, gpu.uuid, f"Xid {xid}" + (f": {name}" if name else ""), code, time_ns, stays, xid)


def indices_of(local_rank: int, ranks: int, gpus: Sequence[GpuUse], visible: str) -> set[int]:
    """The GPUs of a rank, as everybody hands them out: in turn, by its local_rank; a node's only rank has them all.

    Args:
        local_rank, ranks: which of how many of its node.
        gpus: of the node, by index.
        visible: its CUDA_VISIBLE_DEVICES; "" for all. Numbers count by bus here, which is CUDA's order where a node's
            GPUs are all alike.
    """
    named = [name.strip() for name in visible.split(",") if name.strip()]
    found = [gpu.index for name in named for gpu in gpus if name == str(gpu.index) or gpu.uuid.startswith(name)]
    if len(found) != len(named):
        return {gpu.index for gpu in gpus}  # parts of GPUs (MIG), or of another node
    found = found or [gpu.index for gpu in gpus]
    return {found[local_rank % len(found)]} if ranks > 1 and found else set(found)


def to_blame(faults: Sequence[GpuFault], failed_ns: int) -> GpuFault | None:
    """The fault that a failure comes of, if one does: the first of the hardware's, else of the program's.

    Args:
        faults: of the GPUs of the rank that has failed, the oldest first.
        failed_ns: when it has failed; what comes of the end itself is after that.
    """
    own = [each for each in faults if each.code and not (each.xid == _OF_AN_END and each.time_ns > failed_ns)]
    return min(own, key=lambda each: not each.is_hardware, default=None)


class GpuWatch:
    """Looks at a node's GPUs while it is open, from now on.

    Args:
        warn: takes a sentence about each new fault.
    """

    def __init__(self, warn: Callable[[str], object]) -> None:
        self._warn = warn
        self._uses: tuple[GpuUse, ...] = ()
        self._faults: tuple[GpuFault, ...] = ()
        self._gpus: dict[Any, tuple[GpuUse, Any]] = {}
        self._wanted, self._looked = threading.Event(), threading.Event()
        self._looked.set()
        self._is_open = True
        threading.Thread(target=self._run, name="safedist-gpus", daemon=True).start()

    def __enter__(self) -> GpuWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        self._wanted.set()

    def usage(self) -> tuple[GpuUse, ...]:
        """Each GPU at the latest look, at most :data:`LOOK_SECONDS` ago, by index; () where there are none."""
        return self._uses

    def faults(self) -> tuple[GpuFault, ...]:
        """What was reported until the latest look, the oldest first."""
        return self._faults

    def look(self) -> None:
        """Now; waits at most :data:`ANSWER_SECONDS`, and for no driver that has not answered the last time."""
        if self._is_open and self._looked.is_set():
            self._looked.clear()
            self._wanted.set()
            self._looked.wait(ANSWER_SECONDS)

    # --- the thread --------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            import pynvml as nvml

            nvml.nvmlInit()
            try:
                self._watch(nvml)
            finally:
                nvml.nvmlShutdown()
        except Exception as error:  # not installed, no driver, or one at its end: the job goes on
            logger.debug(f"no GPUs are watched: {type(error).__name__}: {error}")
        finally:
            self._is_open = False
            self._looked.set()

    def _watch(self, nvml: Any) -> None:
        events = None
        with suppress(nvml.NVMLError):
            events = nvml.nvmlEventSetCreate()
        for index in range(nvml.nvmlDeviceGetCount()):
            with suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                self._gpus[_address(handle)] = GpuUse(index, nvml.nvmlDeviceGetUUID(handle)), handle
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        while self._is_open:
            self._wanted.clear()
            is_asked = not self._looked.is_set()  # whoever asks from now on has a further look
            self._look(nvml, events)
            if is_asked:
                self._looked.set()
            self._wanted.wait(LOOK_SECONDS)

    def _look(self, nvml: Any, events: Any) -> None:
        with suppress(nvml.NVMLError):  # none is left; or a GPU is lost, which each says below
            for _ in range(_MOST_EVENTS):
                event = nvml.nvmlEventSetWait_v2(events, 0)
                # By its handle, as NVIDIA's DCGM does: a GPU that is lost does not tell its UUID.
                gpu, _handle = self._gpus.get(_address(event.device), (GpuUse(-1, ""), None))
                self._note(fault_of(int(event.eventData), gpu, time.time_ns()))
        self._uses = tuple(self._use(nvml, handle, gpu) for gpu, handle in self._gpus.values())

    def _use(self, nvml: Any, handle: Any, gpu: GpuUse) -> GpuUse:
        facts: dict[str, Any] = {}
        for name, ask in _FACTS.items():
            try:
                facts[name] = ask(nvml, handle)
            except nvml.NVMLError_GpuIsLost:
                self._note(fault_of(_OFF_THE_BUS, gpu, time.time_ns()))
                return gpu
            except nvml.NVMLError:  # it does not tell that
                continue
        return replace(gpu, **facts)

    def _note(self, fault: GpuFault) -> None:
        """Once, where it stays or comes again."""
        before = [each for each in self._faults if (each.index, each.what) == (fault.index, fault.what)]
        if not before:
            self._warn(f"{fault}")
        if not (before and fault.stays):
            self._faults = (*(each for each in self._faults if each not in before), fault)[-_MOST_FAULTS:]


def _slowed(reasons: int) -> str:
    return ", ".join(why for mask, why in _SLOWED.items() if reasons & mask)


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
