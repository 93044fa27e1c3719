"""What both of the operator's controllers do to make a pod of a role's template."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

LABEL = "training.kubeflow.org"


def own_labels(manifest: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, str]:
    """The operator's labels of an object of the job."""
    base = {"job-name": manifest["metadata"]["name"], "operator-name": f"{manifest['kind'].lower()}-controller"}
    return {f"{LABEL}/{key}": value for key, value in {**base, **labels}.items()}


def make_pod(
    manifest: Mapping[str, Any], replica: Mapping[str, Any], name: str, labels: Mapping[str, str]
) -> dict[str, Any]:
    """A pod of the role, with the role's restart policy."""
    template = copy.deepcopy(replica["template"])
    metadata = template.get("metadata", {})
    spec = template["spec"]
    spec["restartPolicy"] = replica["restartPolicy"]
    named = {
        **metadata,
        "name": name,
        "namespace": manifest["metadata"]["namespace"],
        "labels": {**metadata.get("labels", {}), **own_labels(manifest, labels)},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": named, "spec": spec}


def variables(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
    """As a container's ``env`` has them; Go leaves out an empty value."""
    return [{"name": name, "value": value} if value else {"name": name} for name, value in pairs]
