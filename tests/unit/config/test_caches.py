"""The table of compile caches: one row for each, and every row sends a rank to a directory of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flytekitplugins_safedist.agent.scratch import RankScratch
from flytekitplugins_safedist.config.caches import CACHE_NAMES, CACHES
from flytekitplugins_safedist.envvars import IDENTITY, TMPDIR


def test_each_row_has_a_usable_name_and_variable_of_its_own_and_a_source() -> None:
    assert len({cache.name for cache in CACHES}) == len(CACHES) == len(CACHE_NAMES)
    assert len({cache.variable for cache in CACHES}) == len(CACHES)
    for cache in CACHES:
        assert re.fullmatch(r"[a-z][a-z_]*", cache.name), "it becomes a directory, and users type it"
        assert re.fullmatch(r"[A-Z][A-Z_]*", cache.variable)
        assert cache.variable not in IDENTITY | {TMPDIR}
        assert len(cache.source) > 10, cache.name


def test_the_caches_known_to_corrupt_each_other_are_in_the_table() -> None:
    known = {"triton", "inductor", "torch_extensions", "cuda", "numba", "matplotlib"}
    assert known <= {*CACHE_NAMES}


def test_a_rank_gets_a_private_directory_for_each_cache_unless_it_is_shared_on_purpose() -> None:
    scratch = RankScratch(Path("/s/round-0/rank-1"), Path("/t/0-1"), Path("/s/cache/rank-1"))
    private = scratch.environment(shared=())
    own = {TMPDIR: "/t/0-1", "TORCHELASTIC_ERROR_FILE": "/s/round-0/rank-1/error.json"}
    assert private == own | {cache.variable: f"/s/cache/rank-1/{cache.name}" for cache in CACHES}
    shared = scratch.environment(shared={"triton", "cuda"})
    assert set(private) - set(shared) == {"TRITON_CACHE_DIR", "CUDA_CACHE_PATH"}
    other = RankScratch(Path("/s/round-0/rank-2"), Path("/t/0-2"), Path("/s/cache/rank-2"))
    assert other.environment(shared=()).items().isdisjoint(private.items())


def test_torch_takes_its_inductor_and_extension_directories_from_these_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch.utils.cpp_extension import _get_build_directory

    for variable, path in RankScratch(tmp_path, tmp_path, tmp_path / "cache").environment(shared=()).items():
        monkeypatch.setenv(variable, path)
    assert Path(cache_dir()) == tmp_path / "cache" / "inductor"
    assert Path(_get_build_directory("ext", verbose=False)).is_relative_to(tmp_path / "cache" / "torch_extensions")
