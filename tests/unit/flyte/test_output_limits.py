"""Which outputs Flyte would refuse: by their sizes, the cluster's limit, and what it offloads."""

from __future__ import annotations

import pytest
from flyteidl.core import literals_pb2

from flytekitplugins_safedist.errors import ConfigError, PayloadError
from flytekitplugins_safedist.flyte.output_limits import OutputLimits, limits_from, refusal, refused

MIB = 1024**2


@pytest.mark.parametrize(
    ("environment", "limits"),
    [
        ({}, OutputLimits(2 * MIB, None, 0)),
        ({"SAFEDIST_MAX_OUTPUT_BYTES": "5000"}, OutputLimits(5000, None, 0)),
        ({"_F_L_MIN_SIZE_MB": "10"}, OutputLimits(2 * MIB, 10 * MIB, 1000 * MIB)),
        ({"_F_L_MIN_SIZE_MB": "1", "_F_L_MAX_SIZE_MB": "20"}, OutputLimits(2 * MIB, MIB, 20 * MIB)),
        ({"_F_L_MAX_SIZE_MB": "20"}, OutputLimits(2 * MIB, None, 0)),  # flytekit looks at the other one
    ],
)
def test_limits_are_what_the_pod_is_told(environment: dict[str, str], limits: OutputLimits) -> None:
    assert limits_from(environment) == limits


@pytest.mark.parametrize("said", ["", "2MiB", "-5", "1.5", "²"])
def test_a_limit_that_is_no_number_is_an_error_of_the_configuration(said: str) -> None:
    with pytest.raises(ConfigError, match=r"SAFEDIST_MAX_OUTPUT_BYTES=.* is not a positive number of bytes"):
        limits_from({"SAFEDIST_MAX_OUTPUT_BYTES": said})


@pytest.mark.parametrize(
    ("sizes", "limits", "large"),
    [
        ({}, OutputLimits(), []),
        ({"o0": MIB, "o1": MIB // 2}, OutputLimits(), []),
        ({"o0": 6 * MIB, "o1": 10}, OutputLimits(), ["o0"]),
        ({"o0": MIB, "o1": MIB, "o2": 10}, OutputLimits(), ["o0", "o1"]),  # together
        ({"o0": 6 * MIB}, OutputLimits(offload_from=10 * MIB, offload_below=1000 * MIB), ["o0"]),  # in between
        ({"o0": 10 * MIB, "o1": MIB}, OutputLimits(offload_from=10 * MIB, offload_below=1000 * MIB), []),
        ({"o0": 1000 * MIB}, OutputLimits(offload_from=10 * MIB, offload_below=1000 * MIB), ["o0"]),
    ],
)
def test_what_is_refused_is_named(sizes: dict[str, int], limits: OutputLimits, large: list[str]) -> None:
    assert refused(sizes, limits) == {name: sizes[name] for name in large}


@pytest.mark.parametrize("room", [-1, 0, 64])
def test_nothing_over_the_limit_passes_and_nothing_well_below_it_is_refused(room: int) -> None:
    outputs = literals_pb2.LiteralMap()
    literal = outputs.literals["o0"]
    literal.scalar.primitive.string_value = "x" * 2_000_000
    whole = outputs.ByteSize() + room
    assert bool(refused({"o0": literal.ByteSize()}, OutputLimits(whole))) == (room < 64)


def test_the_error_names_outputs_sizes_limit_place_and_ways_out() -> None:
    error = refusal({"small": 3_000_000, "big": 6_000_000}, OutputLimits(), kept="all values are kept at s3://b/x")
    assert isinstance(error, PayloadError), "which is never tried again"
    text = str(error)
    assert "because of 'big' (6,000,000 bytes), 'small' (3,000,000 bytes); nothing was uploaded" in text
    assert "and all values are kept at s3://b/x" in text
    assert "FlyteFile" in text
    assert "SAFEDIST_MAX_OUTPUT_BYTES" in text
    assert "it does not now" in text


def test_the_error_says_from_which_size_on_this_cluster_offloads() -> None:
    limits = OutputLimits(offload_from=10_000_000, offload_below=99_000_000)
    assert "offloads values from 10,000,000 bytes on, below 99,000,000" in str(refusal({"o0": 5}, limits, kept="x"))
