"""What Flyte takes as a task's outputs, and what to do with more. Pure.

Flyte's propeller reads ``outputs.pb`` and refuses it over a size, after the work is done: ``OutputSizeExceeded … max
allowed [2097152] bytes`` (flyteplugins ``ioutils/remote_file_output_reader.go``; ``storage.limits.maxDownloadMBs`` and
``propeller.max-output-size-bytes`` of the cluster's configuration, which no pod sees). Where the cluster offloads
literals, its pods know from which size on, and flytekit writes larger ones to files of their own
(``flytekit/bin/entrypoint.py``, ``_dispatch_execute``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .. import envvars
from ..errors import ConfigError, OutputTooLargeError, Problem

DEFAULT_BYTES = 2 * 1024**2
"""Flyte's own default."""

_REFERENCE_BYTES = 1024
"""About what stands in ``outputs.pb`` for an offloaded value: an address, a hash, a type."""


_ENTRY_BYTES = 16
"""At most what the map of outputs adds to a value and its name."""


@dataclass(frozen=True)
class OutputLimits:
    """Sizes in bytes.

    Attributes:
        whole: the largest ``outputs.pb``.
        offload_from: a value of this size on goes to a file of its own; None: this cluster offloads nothing.
        offload_below: a value must be smaller than this to be offloaded.
    """

    whole: int = DEFAULT_BYTES
    offload_from: int | None = None
    offload_below: int = 0


def limits_from(environment: Mapping[str, str]) -> OutputLimits:
    """The limits that hold for a pod with these variables.

    Raises:
        ConfigError: a variable is not a positive number.
    """
    text = environment.get(envvars.MAX_OUTPUT_BYTES, str(DEFAULT_BYTES))
    if not (text.isascii() and text.isdigit() and int(text)):
        problem = Problem(envvars.MAX_OUTPUT_BYTES, text, "is not a positive number of bytes", "set one, or unset it")
        raise ConfigError([problem])
    whole = int(text)
    start = environment.get(envvars.FLYTE_OFFLOAD_MIN_MB)
    if start is None or not start.isdigit():
        return OutputLimits(whole)
    end = environment.get(envvars.FLYTE_OFFLOAD_MAX_MB, "1000")  # flytekit's default
    return OutputLimits(whole, int(start) * 1024**2, int(end) * 1024**2 if end.isdigit() else 1000 * 1024**2)


def refused(sizes: Mapping[str, int], limits: OutputLimits) -> dict[str, int]:
    """The outputs because of which Flyte would refuse all, with their sizes; none when it takes them.

    Args:
        sizes: bytes of each output as a literal.
        limits: what the cluster takes.
    """
    inline, beyond = {}, {}
    for name, size in sizes.items():
        if limits.offload_from is None or size < limits.offload_from:
            inline[name] = size + len(name.encode()) + _ENTRY_BYTES
        elif size >= limits.offload_below:
            beyond[name] = size
    room = limits.whole - _REFERENCE_BYTES * (len(sizes) - len(inline) - len(beyond))
    if sum(inline.values()) > room:
        # Who holds more than an equal share: one output alone, or several together.
        beyond |= {name: sizes[name] for name, held in inline.items() if held > room / len(inline)}
    return beyond


def refusal(large: Mapping[str, int], limits: OutputLimits, *, kept: str) -> OutputTooLargeError:
    """The error for outputs that Flyte would refuse.

    Args:
        large: from :func:`refused`.
        limits: what the cluster takes.
        kept: where the values are, or why they are not, as a clause.
    """
    names = ", ".join(f"{name!r} ({size:,} bytes)" for name, size in sorted(large.items(), key=lambda item: -item[1]))
    if limits.offload_from is None:
        offloading = "or have the cluster offload large values (propeller's literal-offloading-config; it does not now)"
    else:
        offloading = (
            f"(this cluster offloads values from {limits.offload_from:,} bytes on, below {limits.offload_below:,})"
        )
    return OutputTooLargeError(
        f"Flyte would refuse the outputs of this task, because of {names}; nothing was uploaded as outputs, and {kept}",
        expected=f"at most {limits.whole:,} bytes for all outputs together",
        hint=f"return large values as FlyteFile, FlyteDirectory or a data frame, {offloading}. Where this cluster's "
        f"limit is another, set {envvars.MAX_OUTPUT_BYTES} in the task's environment",
    )
