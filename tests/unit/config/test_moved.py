"""Fields that moved into ``cluster=Kubeflow(...)``: taken and read for one release, with a warning; never both."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import replace
from typing import Any

import pytest

from flytekitplugins_safedist import ConfigError, Kubeflow, SafeHorovod, SafeTorch, ScratchVolume
from flytekitplugins_safedist.config.moved import MOVED
from flytekitplugins_safedist.config.options import SafeDistributed

VALUES: dict[str, Any] = {
    "operator": "mpi",
    "one_node_job": True,
    "master": "a master",
    "worker": "a worker",
    "launcher": "a launcher",
    "run_policy": "a policy",
    "shared_memory": "64Gi",
    "scratch_volume": ScratchVolume(claim="team"),
}
# To a type checker the old fields are gone; here they are what is tested.
FLAT: list[Any] = [SafeHorovod, SafeTorch, SafeDistributed]


def test_every_field_of_the_cluster_was_a_field_of_the_config() -> None:
    assert tuple(VALUES) == MOVED


@pytest.mark.parametrize("config", FLAT)
@pytest.mark.parametrize("name", MOVED)
def test_an_old_field_makes_the_same_config_and_names_the_new_spelling(config: Any, name: str) -> None:
    said = rf"^{name} of {config.__name__} moved: write {config.__name__}\(..., cluster=Kubeflow\({name}=...\)\)$"
    with pytest.warns(DeprecationWarning, match=said) as caught:
        old = config(nodes=2, **{name: VALUES[name]})

    assert old == config(nodes=2, cluster=Kubeflow(**{name: VALUES[name]}))
    assert [warning.filename for warning in caught] == [__file__]


def test_several_old_fields_are_one_warning() -> None:
    with pytest.warns(DeprecationWarning, match="operator, worker of SafeTorch moved") as caught:
        old = FLAT[1](operator="mpi", worker="w")

    assert old.cluster == Kubeflow(operator="mpi", worker="w")  # type: ignore[arg-type]  # any value is held
    assert len(caught) == 1


@pytest.mark.parametrize("cluster", [Kubeflow(), Kubeflow(worker="w")])  # type: ignore[arg-type]
def test_both_spellings_at_once_are_one_error_that_says_where_all_of_it_goes(cluster: Kubeflow) -> None:
    with pytest.raises(ConfigError) as caught:
        FLAT[1](operator="mpi", run_policy="p", cluster=cluster)

    assert str(caught.value).startswith(
        "2 problems: operator='mpi' is given beside cluster=, which holds it now (write all of it there: "
        "cluster=Kubeflow(operator=..., run_policy=...)); run_policy='p' is given"
    )


@pytest.mark.parametrize("name", MOVED)
def test_an_old_field_can_still_be_read_with_a_warning(name: str) -> None:
    config: Any = SafeTorch(cluster=Kubeflow(**{name: VALUES[name]}))

    with pytest.warns(DeprecationWarning, match=rf"^{name} moved: read .cluster.{name}$"):
        assert getattr(config, name) == VALUES[name]


def test_what_never_was_a_field_is_missing_as_ever() -> None:
    config: Any = SafeTorch()
    with pytest.raises(AttributeError, match="'SafeTorch' object has no attribute 'operater'"):
        _ = config.operater
    with pytest.raises(TypeError, match="operater"):
        FLAT[1](operater="mpi")


def test_the_new_spelling_warns_of_nothing_also_when_a_config_is_changed_or_moved() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = SafeTorch(nodes=2, cluster=Kubeflow(operator="mpi"))
        assert replace(config, nodes=3).cluster.operator == "mpi"
        assert pickle.loads(pickle.dumps(config)) == config
        assert hash(config) == hash(SafeTorch(nodes=2, cluster=Kubeflow(operator="mpi")))


def test_a_config_without_a_cluster_of_its_own_takes_an_old_field_by_replace() -> None:
    change: Any = {"operator": "mpi"}
    with pytest.warns(DeprecationWarning, match="operator of SafeTorch moved"):
        assert replace(SafeTorch(nodes=2), **change).cluster == Kubeflow(operator="mpi")
