"""What is measured of a run while it goes on, and the ways out of a node for it: OpenTelemetry's own library, in this
process, for Prometheus and for a collector.

No job fails for them: what cannot be begun is a warning, and what is away is tried again by the library, on a thread of
its own.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..config.options import Metrics

if TYPE_CHECKING:
    from opentelemetry.metrics import Observation

logger = logging.getLogger(__name__)

_LAST_EXPORT_SECONDS = 1.5
"""That the end of a job waits for it."""


@dataclass(frozen=True)
class Instrument:
    """One of what is measured.

    Attributes:
        name: with dots, as OpenTelemetry writes it.
        unit: as in UCUM.
        help: what it is, in a sentence.
        label: what its values are told apart by; "": it has one.
        counts: whether it only grows.
    """

    name: str
    unit: str
    help: str
    label: str = ""
    counts: bool = False


Readings = Mapping[Instrument, Mapping[Any, float]]
"""The values of each, by that of its label."""

_counter, _gauge = partial(Instrument, counts=True), Instrument

RESTARTS = _counter(
    "safedist.restarts", "{restart}", "Restarts of all ranks together in this attempt; node 0 tells it."
)
LOSSES = _counter("safedist.losses", "{node}", "Nodes lost in this attempt; node 0 tells it.")
STAGING = _counter("safedist.staging.time", "s", "Time in which the task's code was put on this node.")
FILES = _counter("safedist.inputs.files", "{file}", "Files of inputs that were downloaded for all ranks of this node.")
BYTES = _counter("safedist.inputs.size", "By", "Bytes of inputs that were downloaded for all ranks of this node.")
RENDEZVOUS = _counter("safedist.rendezvous.time", "s", "Time in which this node waited for the others.")
STEP = _gauge("safedist.rank.step", "{step}", "Number of the step that the rank is in.", "rank")
STEPS = _counter("safedist.rank.steps", "{step}", "Steps that the rank has ended.", "rank")
_STALLED = "Time in steps that took ten times as long as the others, and a second."
STALLED = _counter("safedist.rank.stall.time", "s", _STALLED, "rank")
MEMORY = _gauge("safedist.rank.memory.usage", "By", "Memory that the rank's process holds.", "rank")
_BUSY = "Part of the last second or so in which the GPU ran a kernel."
GPU_BUSY = _gauge("safedist.gpu.utilization", "1", _BUSY, "gpu")
GPU_MEMORY = _gauge("safedist.gpu.memory.usage", "By", "Memory of the GPU that is in use.", "gpu")

TABLE = tuple(each for each in list(globals().values()) if isinstance(each, Instrument))
"""All of them, in this order."""


def begin(
    metrics: Metrics,
    read: Callable[[], Readings],
    labels: Mapping[str, str],
    held: ExitStack,
    warn: Callable[[str], object],
) -> None:
    """Begin to tell what is measured here.

    Args:
        metrics: which ways the user wants.
        read: gives the latest values; called in threads of the library.
        labels: attributes of all of them, with OpenTelemetry's names.
        held: ends it all, after a last export of what *read* gives then.
        warn: takes a sentence on each way that is not there.
    """
    readers: list[Any] = []
    with _warning(warn, "no metrics for prometheus"):
        if metrics.prometheus is not None:
            readers.append(_scraped(metrics.prometheus, held))
    with _warning(warn, "no metrics for otlp"):
        if metrics.otlp:  # as the OTEL_* variables of this process say
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

            readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
    with _warning(warn, "no metrics"):
        if readers:
            held.callback(measure(readers, read, labels))


@contextmanager
def _warning(warn: Callable[[str], object], what: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        warn(f"{what}: {error}: the image needs it (docs/metrics.md)")
    except Exception as error:  # a port that is taken; a variable that the library cannot read
        warn(f"{what}: {type(error).__name__}: {error}")


def _scraped(port: int, held: ExitStack) -> Any:
    """What answers Prometheus at a port of every address of this pod."""
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()  # not the process's global one, which has more than ours
    everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104  (a pod's; it has one of them)
    server, _ = start_http_server(port, everywhere, registry)
    held.callback(server.server_close)
    held.callback(server.shutdown)
    return PrometheusMetricReader(registry=registry, scope_info_enabled=False)


def measure(readers: list[Any], read: Callable[[], Readings], labels: Mapping[str, str]) -> Callable[[], object]:
    """Have them read, until what is returned is called."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    # What the variables say of the resource comes before what we say.
    resource = Resource.create(labels).merge(OTELResourceDetector().detect())
    # Not the process's global one, which may be the user's.
    provider = MeterProvider(readers, resource, shutdown_on_exit=False)
    meter = provider.get_meter("flytekitplugins_safedist")
    for each in TABLE:
        create = meter.create_observable_counter if each.counts else meter.create_observable_gauge
        create(each.name, [partial(_observed, each, read)], each.unit, each.help)

    def end() -> None:
        try:
            provider.shutdown(timeout_millis=_LAST_EXPORT_SECONDS * 1000)
        except Exception as error:  # whatever an exporter raises: the job has its result
            logger.debug(f"the last metrics are not sent: {type(error).__name__}: {error}")

    return end


def _observed(instrument: Instrument, read: Callable[[], Readings], _options: object) -> Iterator[Observation]:
    from opentelemetry.metrics import Observation

    for label, value in read().get(instrument, {}).items():
        yield Observation(value, {instrument.label: str(label)} if instrument.label else {})
