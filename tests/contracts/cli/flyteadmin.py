"""A stand-in for Flyte's control plane, inside the test process: a gRPC server on flyteidl's own stubs.

A fake, because no Flyte backend can run where these tests do. It stores what the real CLIs send and answers what they
ask for; signed upload URLs lead to a small HTTP server that keeps the body and checks its digest. It decides nothing:
what a backend would make of the messages is the business of :mod:`flytekitplugins_safedist.tools.render`.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from flyteidl.admin import (
    execution_pb2,
    launch_plan_pb2,
    project_domain_attributes_pb2,
    project_pb2,
    task_pb2,
    version_pb2,
    workflow_pb2,
)
from flyteidl.core import identifier_pb2
from flyteidl.service import admin_pb2_grpc, dataproxy_pb2, dataproxy_pb2_grpc


@dataclass
class Received:
    """Everything that was sent, by name."""

    tasks: dict[str, task_pb2.TaskCreateRequest] = field(default_factory=dict)
    workflows: dict[str, workflow_pb2.WorkflowCreateRequest] = field(default_factory=dict)
    launch_plans: dict[str, launch_plan_pb2.LaunchPlanCreateRequest] = field(default_factory=dict)
    executions: list[execution_pb2.ExecutionCreateRequest] = field(default_factory=list)
    uploads: dict[str, bytes] = field(default_factory=dict)


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """Registrations and executions."""

    def __init__(self, received: Received) -> None:
        self._received = received

    def CreateTask(self, request: Any, context: Any) -> Any:
        self._received.tasks[request.id.name] = request
        return task_pb2.TaskCreateResponse()

    def CreateWorkflow(self, request: Any, context: Any) -> Any:
        self._received.workflows[request.id.name] = request
        return workflow_pb2.WorkflowCreateResponse()

    def CreateLaunchPlan(self, request: Any, context: Any) -> Any:
        self._received.launch_plans[request.id.name] = request
        return launch_plan_pb2.LaunchPlanCreateResponse()

    def CreateExecution(self, request: Any, context: Any) -> Any:
        self._received.executions.append(request)
        identifier = identifier_pb2.WorkflowExecutionIdentifier(
            project=request.project, domain=request.domain, name=request.name or "f1"
        )
        return execution_pb2.ExecutionCreateResponse(id=identifier)

    def GetExecution(self, request: Any, context: Any) -> Any:
        spec = self._received.executions[-1].spec
        return execution_pb2.Execution(id=request.id, spec=spec, closure=execution_pb2.ExecutionClosure())

    def GetTask(self, request: Any, context: Any) -> Any:
        sent = self._received.tasks.get(request.id.name)
        if sent is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such task")
            raise AssertionError
        closure = task_pb2.TaskClosure()
        closure.compiled_task.template.CopyFrom(sent.spec.template)
        return task_pb2.Task(id=request.id, closure=closure)

    def GetWorkflow(self, request: Any, context: Any) -> Any:
        sent = self._received.workflows.get(request.id.name)
        if sent is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such workflow")
            raise AssertionError
        closure = workflow_pb2.WorkflowClosure()
        closure.compiled_workflow.primary.template.CopyFrom(sent.spec.template)
        for task in self._received.tasks.values():
            closure.compiled_workflow.tasks.add().template.CopyFrom(task.spec.template)
        return workflow_pb2.Workflow(id=request.id, closure=closure)

    def GetLaunchPlan(self, request: Any, context: Any) -> Any:
        sent = self._received.launch_plans.get(request.id.name)
        if sent is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such launch plan")
            raise AssertionError
        return launch_plan_pb2.LaunchPlan(id=request.id, spec=sent.spec, closure=launch_plan_pb2.LaunchPlanClosure())

    def GetProject(self, request: Any, context: Any) -> Any:
        return project_pb2.Project(id=request.id)

    def GetVersion(self, request: Any, context: Any) -> Any:
        return version_pb2.GetVersionResponse()

    def GetProjectDomainAttributes(self, request: Any, context: Any) -> Any:
        return project_domain_attributes_pb2.ProjectDomainAttributesGetResponse()


class DataProxy(dataproxy_pb2_grpc.DataProxyServiceServicer):
    """Places to upload to."""

    def __init__(self, url: str) -> None:
        self._url = url

    def CreateUploadLocation(self, request: Any, context: Any) -> Any:
        name = f"{request.filename_root or request.content_md5.hex()}/{request.filename}"
        return dataproxy_pb2.CreateUploadLocationResponse(
            signed_url=f"{self._url}/{name}", native_url=f"s3://uploads/{name}"
        )


def _uploads(received: Received) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            sent = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
            whole = self.headers["Content-MD5"] == sent
            if whole:
                received.uploads["s3://uploads" + self.path] = body
            self.send_response(200 if whole else 400)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def serving() -> Iterator[tuple[str, Received]]:
    """Serve on loopback; gives the endpoint (host:port) and what was received."""
    received = Received()
    http = ThreadingHTTPServer(("127.0.0.1", 0), _uploads(received))
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    server = grpc.server(ThreadPoolExecutor(4))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(Admin(received), server)
    dataproxy_pb2_grpc.add_DataProxyServiceServicer_to_server(
        DataProxy(f"http://127.0.0.1:{http.server_address[1]}"), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", received
    finally:
        server.stop(grace=None).wait()
        http.shutdown()
        thread.join()
        http.server_close()
