"""A job, its pods and their events, read from a cluster with the caller's own kubeconfig: nothing is written."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from ..errors import SafedistError
from ..texts import named
from .why import JOB_NAME, Json, Picture

_SECONDS = 20
"""How long the API server may take to answer."""
_PAGE = 500
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Cluster:
    """The API server that a kubeconfig's context names; in a pod, its own."""

    def __init__(self, context: str | None, env: Mapping[str, str]) -> None:
        """Raises SafedistError: there is no kubeconfig, or it cannot be read."""
        from kubernetes import client, config
        from kubernetes.config import kube_config

        kubeconfig = env.get("KUBECONFIG")
        settings = client.Configuration()
        try:
            if "KUBERNETES_SERVICE_HOST" in env and not kubeconfig and not context:
                config.load_incluster_config(settings)
                self._namespace = (_SERVICE_ACCOUNT / "namespace").read_text()
            else:
                config.load_kube_config(kubeconfig, context, settings)
                files = kube_config.KubeConfigMerger(kubeconfig or kube_config.KUBE_CONFIG_DEFAULT_LOCATION)
                chosen = kube_config.KubeConfigLoader(files.config, active_context=context).current_context
                self._namespace = chosen["context"].get("namespace") or "default"
        except Exception as error:  # of a file that people write, and that the client takes as it comes
            hint = "set KUBECONFIG, or name a context of `kubectl config get-contexts` with --context"
            raise SafedistError("no cluster can be asked", seen=named(error), hint=hint) from error
        self._api = client.ApiClient(settings)

    def pictures(self, name: str, namespace: str | None) -> list[Picture]:
        """Each PyTorchJob and lone pod that ``name`` means, oldest first: an execution's, a job, or a pod.

        Args:
            namespace: None: the context's own, and if nothing is there, all.

        Raises:
            SafedistError: there is none, or the API server refuses, or does not answer.
        """
        namespaces = [namespace] if namespace else [self._namespace, ""]
        for each in namespaces:
            pictures = [self._picture(job, pods) for job, pods in self._find(name, each)]
            if pictures:
                return sorted(pictures, key=lambda picture: picture.since)
        where = {"namespace": " and ".join(each or "all" for each in namespaces)}
        hint = "name the namespace (-n PROJECT-DOMAIN); objects of executions that ended long ago are gone"
        raise SafedistError(f"no execution, PyTorchJob or pod is called {name}", where=where, hint=hint)

    def _find(self, name: str, namespace: str) -> Iterator[tuple[Json | None, list[Json]]]:
        pods = self._list("/api/v1", "pods", namespace, fieldSelector=f"metadata.name={name}")
        if pods and (owner := pods[0]["metadata"].get("labels", {}).get(JOB_NAME)):
            name, namespace, pods = owner, pods[0]["metadata"]["namespace"], []
        jobs = self._list("/apis/kubeflow.org/v1", "pytorchjobs", namespace, fieldSelector=f"metadata.name={name}")
        if not pods and not jobs:
            execution: Json = {"labelSelector": f"execution-id={name}"}
            jobs = self._list("/apis/kubeflow.org/v1", "pytorchjobs", namespace, **execution)
            pods = self._list("/api/v1", "pods", namespace, **execution)
        for job in jobs:
            about = job["metadata"]
            yield job, self._list("/api/v1", "pods", about["namespace"], labelSelector=f"{JOB_NAME}={about['name']}")
        for pod in pods:
            if JOB_NAME not in pod["metadata"].get("labels", {}):
                yield None, [pod]

    def _picture(self, job: Json | None, pods: list[Json]) -> Picture:
        about = (job or pods[0])["metadata"]
        names = {about["name"], *(pod["metadata"]["name"] for pod in pods)}
        events = self._list("/api/v1", "events", about["namespace"])
        words = {"reason": "", "message": ""}  # the API leaves out what is empty
        mine = [{**words, **event} for event in events if event["involvedObject"].get("name") in names]
        nodes: list[Json] | None = None
        neighbours: list[Json] = []
        if any(pod["status"].get("phase") == "Pending" and not pod["spec"].get("nodeName") for pod in pods):
            nodes = self._list("/api/v1", "nodes", "", may=True)
            neighbours = self._list("/api/v1", "pods", "", may=True) or []
        return Picture(job, pods, mine, time.time(), nodes, neighbours)

    def _list(self, group: str, kind: str, namespace: str, *, may: bool = False, **selectors: Any) -> Any:
        """All objects of a kind; with ``may``, None where the caller has no right to see them."""
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        path = f"{group}/namespaces/{namespace}/{kind}" if namespace else f"{group}/{kind}"
        objects: list[Json] = []
        further = ""
        while True:
            query = urlencode({"limit": _PAGE, **selectors, **({"continue": further} if further else {})})
            try:
                page = self._get(f"{path}?{query}")
            except ApiException as error:
                if error.status == 404 and kind == "pytorchjobs":
                    return objects  # no training-operator here: lone pods need none
                if error.status == 403 and may:
                    return None
                what, where = f"the API server refuses to list {kind}", {"namespace": namespace or "all"}
                seen = f"{error.status} {_words(error.body) or error.reason}"
                hint = "name the namespace (-n PROJECT-DOMAIN), or ask for the right to get and list it"
                raise SafedistError(what, where=where, seen=seen, hint=hint) from error
            except HTTPError as error:
                where, hint = {"server": self._api.configuration.host}, "is it the right context?"
                raise SafedistError("the API server does not answer", where=where, seen=error, hint=hint) from error
            objects += page["items"]
            further = page["metadata"].get("continue", "")
            if not further:
                return objects

    def _get(self, path: str) -> Any:
        answer = self._api.call_api(
            path,
            "GET",
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
            _preload_content=False,
            _return_http_data_only=True,
            _request_timeout=_SECONDS,
        )
        return json.loads(answer.data)


def _words(body: Any) -> str:
    try:
        return str(json.loads(body)["message"])
    except (TypeError, ValueError, KeyError):
        return ""
