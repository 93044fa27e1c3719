"""The pod of a task: what is put into it, and what of the user's stays."""

from __future__ import annotations

import pytest
from flytekit.core.pod_template import PodTemplate
from kubernetes.client import ApiClient, V1Container, V1PodSpec, V1ResourceRequirements

from flytekitplugins_safedist import SafeTorch
from flytekitplugins_safedist.plugin.pod import merged_template
from tests.unit.config.plans import planned


def merged(template: PodTemplate | None, nodes: int = 1) -> PodTemplate:
    kwargs = {} if template is None else {"pod_template": template}
    made = planned(SafeTorch(nnodes=nodes, nproc_per_node=1), **kwargs)
    return merged_template(made.arguments, made)


@pytest.mark.parametrize(("own", "policy"), [(None, "FallbackToLogsOnError"), ("File", "File")])
def test_the_end_of_the_log_is_what_a_failed_pod_shows_unless_the_users_template_says_otherwise(own, policy):
    container = V1Container(name="primary", termination_message_policy=own)
    sidecar = V1Container(name="sidecar")
    template = merged(PodTemplate(pod_spec=V1PodSpec(containers=[sidecar, container])))

    assert [one.termination_message_policy for one in template.pod_spec.containers] == [policy, None]
    assert container.termination_message_policy == own


ASKED = {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "2Gi"}


@pytest.mark.parametrize("resources", [V1ResourceRequirements(requests=ASKED), {"requests": ASKED}])
def test_what_a_sidecar_requests_is_its_limit_whichever_way_it_is_written(resources):
    sidecar = V1Container(name="sidecar", resources=resources)
    template = merged(PodTemplate(pod_spec=V1PodSpec(containers=[sidecar])))

    (_, container) = ApiClient().sanitize_for_serialization(template.pod_spec)["containers"]
    assert container["resources"] == {"requests": ASKED, "limits": {"cpu": "1", "memory": "1Gi"}}


@pytest.mark.parametrize(
    ("nodes", "spec", "policy"),
    [
        (2, {"host_network": True}, "ClusterFirstWithHostNet"),
        (2, {"host_network": True, "dns_policy": "None"}, "None"),
        (2, {}, None),
        (1, {"host_network": True}, None),
    ],
)
def test_on_a_machines_network_the_names_of_pods_are_still_found(nodes, spec, policy):
    own = V1PodSpec(containers=[], **spec)

    assert merged(PodTemplate(pod_spec=own), nodes).pod_spec.dns_policy == policy
    assert own.dns_policy == spec.get("dns_policy")
