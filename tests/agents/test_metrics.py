"""What an agent tells of its run while it goes on, as Prometheus and an OpenTelemetry collector hear it."""

from __future__ import annotations

import http.server
import queue
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality
from prometheus_client.openmetrics.parser import text_string_to_metric_families as of_openmetrics
from prometheus_client.parser import text_string_to_metric_families as of_text

from tests.harness.nvml import Gpus
from tests.harness.procs import Ended, Gate, Warm, until
from tests.harness.product import ReservedPort

EXECUTION = "an-execution-that-a-variable-names-too"
NAMED = {"FLYTE_INTERNAL_EXECUTION_ID": EXECUTION, "APP_NAME": EXECUTION, "LABEL": "job_metrics.restarts_once"}
TASK = "job_metrics:restarts_once"

Values = dict[str, dict[str, float]]


def scraped(port: int, accept: str) -> tuple[str, str]:
    """The answer to a scrape, and its content type."""
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def read(text: str, parse: Any) -> tuple[Values, dict[str, str]]:
    """Values by sample and rank, and the type of each family."""
    families = list(parse(text))
    values: Values = {}
    for family in families:
        for sample in family.samples:
            values.setdefault(sample.name, {})[sample.labels.get("rank", sample.labels.get("gpu", ""))] = sample.value
    return values, {family.name: family.type for family in families}


def test_prometheus_sees_what_happens_while_it_does(warm, tmp_path, ranks_gate, nvml_driver):
    reserved = ReservedPort()  # its server may bind it meanwhile, and nobody else
    port = reserved.port
    Gpus(tmp_path / "gpus", 2).say(1, busy=25, used=3 << 30, total=80 << 30)
    node = {"TEST_NVML": str(tmp_path / "gpus"), "TEST_NVML_LIBRARY": str(nvml_driver)}
    more = {**ranks_gate.environment, **NAMED, **node, "TEST_PORT": str(port)}
    job = warm.start(TASK, tmp_path / "job", kind="execute", environment=more)
    ranks_gate.heard(2)
    values: Values = {}

    def has_come_to(steps: float) -> bool:
        values.update(read(scraped(port, "text/plain")[0], of_text)[0])
        return values.get("safedist_rank_steps_total") == {"0": steps, "1": steps}

    until(lambda: has_come_to(3), "both ranks' steps are told")
    assert values["safedist_rank_step"] == {"0": 3, "1": 3}
    assert values["safedist_restarts_total"] == values["safedist_losses_total"] == {"": 0}
    assert values["safedist_inputs_files_total"] == values["safedist_inputs_size_bytes_total"] == {"": 0}
    assert all(50 << 20 < value < 50 << 30 for value in values["safedist_rank_memory_usage_bytes"].values())
    assert values["safedist_gpu_utilization"] == {"1": 0.25}
    assert values["safedist_gpu_memory_usage_bytes"] == {"1": 3 << 30}
    ranks_gate.let_go(1)
    ranks_gate.heard(2)
    until(lambda: has_come_to(6), "the second round's steps are counted as well")
    assert values["safedist_restarts_total"] == {"": 1}
    text, kind = scraped(port, "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    _, kinds = read(text, of_openmetrics)
    assert kinds == {
        "target": "info",
        "safedist_restarts": "counter",
        "safedist_losses": "counter",
        "safedist_inputs_files": "counter",
        "safedist_inputs_size_bytes": "counter",
        "safedist_rendezvous_time_seconds": "counter",
        "safedist_rank_step": "gauge",
        "safedist_rank_steps": "counter",
        "safedist_rank_stall_time_seconds": "counter",
        "safedist_rank_memory_usage_bytes": "gauge",
        "safedist_gpu_utilization": "gauge",
        "safedist_gpu_memory_usage_bytes": "gauge",
    }
    assert values["safedist_rendezvous_time_seconds_total"][""] > 0
    assert 'safedist_task="job_metrics.restarts_once"' in text
    assert 'safedist_node="0"' in text
    assert f'safedist_execution="{EXECUTION}"' in text, "a name that the platform gives is no secret"
    ranks_gate.let_go(2)
    assert job.wait().uploaded == ["outputs.pb"]
    reserved.close()


def through_both_rounds(job: Any, gate: Gate) -> Ended:
    gate.heard(2)
    gate.let_go(1)
    gate.heard(2)
    gate.let_go(2)
    ended: Ended = job.wait()
    return ended


def test_a_port_that_is_taken_is_a_warning(warm, tmp_path, ranks_gate):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        more = {**ranks_gate.environment, "TEST_PORT": str(taken.getsockname()[1])}
        job = warm.start(TASK, tmp_path / "job", kind="execute", environment=more)
        ended = through_both_rounds(job, ranks_gate)
    assert ended.uploaded == ["outputs.pb"]
    assert "warning: no metrics for prometheus: OSError: [Errno 98] Address already in use" in ended.err


class Collector:
    """Receives what is exported over OTLP/HTTP."""

    def __init__(self) -> None:
        self.received: queue.SimpleQueue[ExportMetricsServiceRequest] = queue.SimpleQueue()
        self.headers: set[str] = set()
        self.answers = threading.Event()

    def last(self) -> ExportMetricsServiceRequest:
        """What came last."""
        request = self.received.get(timeout=60)
        while not self.received.empty():
            request = self.received.get()
        return request


@contextmanager
def collector(*, answers: bool = True) -> Iterator[tuple[Collector, str]]:
    """One, and its address."""
    heard = Collector()
    if answers:
        heard.answers.set()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/metrics"
            heard.headers.add(self.headers.get("x-who", ""))
            body = self.rfile.read(int(self.headers["Content-Length"]))
            heard.received.put(ExportMetricsServiceRequest.FromString(body))
            heard.answers.wait()
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield heard, f"http://127.0.0.1:{server.server_port}"
        finally:
            heard.answers.set()
            server.shutdown()


def told(request: ExportMetricsServiceRequest) -> tuple[dict[str, str], dict[str, Any], Values]:
    """The resource's attributes, each metric by its name, and their values by rank."""
    [resource] = request.resource_metrics
    [scope] = resource.scope_metrics
    values: Values = {}
    for metric in scope.metrics:
        for point in getattr(metric, metric.WhichOneof("data")).data_points:
            rank = "".join(each.value.string_value for each in point.attributes if each.key == "rank")
            values.setdefault(metric.name, {})[rank] = getattr(point, point.WhichOneof("value"))
    about = {each.key: each.value.string_value for each in resource.resource.attributes}
    return about, {metric.name: metric for metric in scope.metrics}, values


def otlp(warm: Warm, files: Any, gate: Gate, **variables: str) -> Ended:
    more = {**gate.environment, **NAMED, "TEST_OTLP": "1", **variables}
    return through_both_rounds(warm.start(TASK, files, kind="execute", environment=more), gate)


def test_a_collector_hears_of_a_restart_at_the_latest_when_the_job_ends(warm, tmp_path, ranks_gate):
    with collector() as (heard, address):
        ended = otlp(
            warm,
            tmp_path / "job",
            ranks_gate,
            OTEL_EXPORTER_OTLP_ENDPOINT=address,
            OTEL_EXPORTER_OTLP_HEADERS="x-who=me",
            OTEL_RESOURCE_ATTRIBUTES="team=vision",
            OTEL_SERVICE_NAME="digits",
        )
        assert ended.uploaded == ["outputs.pb"], ended.err
        about, metrics, values = told(heard.last())
        assert heard.headers == {"me"}
    assert values["safedist.restarts"] == {"": 1}
    assert values["safedist.losses"] == {"": 0}
    assert values["safedist.rank.steps"] == {"0": 6, "1": 6}
    assert values["safedist.rendezvous.time"][""] > 0
    steps = metrics["safedist.rank.steps"]
    assert steps.unit == "{step}"
    assert steps.sum.is_monotonic
    assert steps.sum.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    assert metrics["safedist.rendezvous.time"].unit == "s"
    expected = {
        "safedist.task": "job_metrics.restarts_once",
        "safedist.execution": EXECUTION,
        "safedist.node": "0",
        "team": "vision",
        "service.name": "digits",
    }
    assert about | expected == about


def test_a_collector_that_is_away_or_never_answers_holds_up_no_job(warm, tmp_path, ranks_gate):
    reserved = ReservedPort()
    away = otlp(warm, tmp_path / "away", ranks_gate, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{reserved.port}")
    reserved.close()
    assert away.uploaded == ["outputs.pb"], away.err
    with collector(answers=False) as (silent, address):
        ended = otlp(
            warm,
            tmp_path / "silent",
            ranks_gate,
            OTEL_EXPORTER_OTLP_ENDPOINT=address,
            OTEL_EXPORTER_OTLP_TIMEOUT="3600",
            OTEL_METRIC_EXPORT_INTERVAL="100",
        )
        assert not silent.received.empty()
        assert not silent.answers.is_set(), "the job has ended, and the collector has not answered"
    assert ended.uploaded == ["outputs.pb"], ended.err
