"""What is measured of a run while it goes on: the one table that all exporters are made from. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Instrument:
    """One of them.

    Attributes:
        name: with dots, as OpenTelemetry writes it.
        unit: as in UCUM.
        help: what it is, in a sentence.
        counts: whether it only grows.
        label: what its values are told apart by; "": it has one.
    """

    name: str
    unit: str
    help: str
    counts: bool = False
    label: str = ""


Readings = Mapping[Instrument, Mapping[str, float]]
"""The values of each, by that of its label."""


RESTARTS = Instrument(
    "safedist.restarts", "{restart}", "Restarts of all ranks together in this attempt; node 0 tells it.", counts=True
)
LOSSES = Instrument("safedist.losses", "{node}", "Nodes lost in this attempt; node 0 tells it.", counts=True)
STAGING = Instrument("safedist.staging.time", "s", "Time in which the task's code was put on this node.", counts=True)
INPUT_FILES = Instrument(
    "safedist.inputs.files", "{file}", "Files of inputs that were downloaded for all ranks of this node.", counts=True
)
INPUT_BYTES = Instrument(
    "safedist.inputs.size", "By", "Bytes of inputs that were downloaded for all ranks of this node.", counts=True
)
RENDEZVOUS = Instrument("safedist.rendezvous.time", "s", "Time in which this node waited for the others.", counts=True)
STEP = Instrument("safedist.rank.step", "{step}", "Number of the step that the rank is in.", label="rank")
STEPS = Instrument("safedist.rank.steps", "{step}", "Steps that the rank has ended.", counts=True, label="rank")
STALLED = Instrument(
    "safedist.rank.stall.time",
    "s",
    "Time in steps that took ten times as long as the others, and a second.",
    counts=True,
    label="rank",
)
MEMORY = Instrument("safedist.rank.memory.usage", "By", "Memory that the rank's process holds.", label="rank")
GPU_BUSY = Instrument(
    "safedist.gpu.utilization", "1", "Part of the last second or so in which the GPU ran a kernel.", label="gpu"
)
GPU_MEMORY = Instrument("safedist.gpu.memory.usage", "By", "Memory of the GPU that is in use.", label="gpu")

TABLE = tuple(each for each in list(globals().values()) if isinstance(each, Instrument))
"""All of them, in this order."""
