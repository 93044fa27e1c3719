"""The ways out of a node for what is measured there: Prometheus' and OpenTelemetry's own libraries, in this process.

No job fails for them: what cannot be begun is a warning, and what is away is tried again by the library, on a thread of
its own.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from ..config.options import Metrics
from .instruments import TABLE, Instrument, Readings, plain

if TYPE_CHECKING:
    from opentelemetry.metrics import Observation

logger = logging.getLogger(__name__)

_LAST_EXPORT_SECONDS = 1.5
"""That the end of a job waits for it."""

_Read = Callable[[], Readings]


def begin(
    metrics: Metrics, read: _Read, about: Mapping[str, str], held: ExitStack, warn: Callable[[str], object]
) -> None:
    """Begin to tell what is measured here.

    Args:
        metrics: which ways the user wants.
        read: gives the latest values; called in threads of the libraries.
        about: attributes of all of them, with OpenTelemetry's names.
        held: ends it all, after a last export of what *read* gives then.
        warn: takes a sentence on each way that is not there.
    """
    ways: list[tuple[str, Callable[..., Callable[[], object]]]] = []
    if metrics.prometheus is not None:
        ways.append(("prometheus", partial(_serve, metrics.prometheus)))
    if metrics.otlp:
        ways.append(("otlp", _send))
    for name, way in ways:
        try:
            held.callback(_without_failing, way(read, about))
        except ImportError as error:
            warn(f"no metrics for {name}: {error}: the image needs it (docs/metrics.md)")
        except Exception as error:  # a port that is taken; a variable that the library cannot read
            warn(f"no metrics for {name}: {type(error).__name__}: {error}")


def _without_failing(end: Callable[[], object]) -> None:
    try:
        end()
    except Exception as error:  # whatever an exporter raises: the job has its result
        logger.debug(f"the last metrics are not sent: {type(error).__name__}: {error}")


def _serve(port: int, read: _Read, about: Mapping[str, str]) -> Callable[[], object]:
    """Answer Prometheus at a port of every address of this pod, until what is returned is called."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(target_info={plain(name): value for name, value in about.items()})
    registry.register(_Collector(read))
    everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104  (a pod's; it has one of them)
    server, _ = start_http_server(port, everywhere, registry)

    def end() -> None:
        server.shutdown()
        server.server_close()

    return end


class _Collector:
    """What prometheus_client asks at each scrape."""

    def __init__(self, read: _Read) -> None:
        self._read = read

    def collect(self) -> Iterator[Any]:
        """The family of each instrument."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        readings = self._read()
        for each in TABLE:
            labels = [each.label] if each.label else []
            kind = CounterMetricFamily if each.counts else GaugeMetricFamily
            family = kind(each.in_prometheus, each.help, labels=labels)
            for label, value in readings.get(each, {}).items():
                family.add_metric([label] if each.label else [], value)
            yield family


def _send(read: _Read, about: Mapping[str, str]) -> Callable[[], object]:
    """Send to a collector, as the OTEL_* variables of this process say, until what is returned is called."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    # What the variables say of the resource comes before what we say.
    resource = Resource.create(about).merge(OTELResourceDetector().detect())
    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    # Not the process's global one, which may be the user's.
    provider = MeterProvider([reader], resource, shutdown_on_exit=False)
    meter = provider.get_meter("flytekitplugins_safedist")
    for each in TABLE:
        create = meter.create_observable_counter if each.counts else meter.create_observable_gauge
        create(each.name, [partial(_observed, each, read)], each.unit, each.help)
    return partial(provider.shutdown, timeout_millis=_LAST_EXPORT_SECONDS * 1000)


def _observed(instrument: Instrument, read: _Read, _options: object) -> Iterator[Observation]:
    from opentelemetry.metrics import Observation

    for label, value in read().get(instrument, {}).items():
        yield Observation(value, {instrument.label: label} if instrument.label else {})
