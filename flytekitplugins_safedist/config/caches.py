"""Compile caches that corrupt or block each other when several ranks share one directory.

One table: the name a user writes in ``Scratch(shared_caches=...)``, the variable that moves the cache, and where that
is documented. Every rank gets its own directory for each, unless the user keeps one shared on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cache:
    """A cache directory that a library takes from a variable.

    Attributes:
        name: what users call it.
        variable: the environment variable that holds its directory.
        source: where the library says so.
        locks: where in it a process that is killed leaves files whose mere existence keeps others waiting.
    """

    name: str
    variable: str
    source: str
    locks: str = ""


CACHES: tuple[Cache, ...] = (
    Cache("triton", "TRITON_CACHE_DIR", "triton/knobs.py: cache.dir"),
    Cache("inductor", "TORCHINDUCTOR_CACHE_DIR", "torch/_inductor/runtime/cache_dir_utils.py"),
    Cache("torch_extensions", "TORCH_EXTENSIONS_DIR", "torch/utils/cpp_extension.py: _get_build_directory", "*/lock"),
    Cache("torch_kernels", "PYTORCH_KERNEL_CACHE_PATH", "aten/src/ATen/native/cuda/jit_utils.cpp"),
    Cache("cuda", "CUDA_CACHE_PATH", "CUDA programming guide, environment variables"),
    Cache("cupy", "CUPY_CACHE_DIR", "CuPy reference, environment variables"),
    Cache("numba", "NUMBA_CACHE_DIR", "Numba reference, environment variables"),
    Cache("miopen", "MIOPEN_CUSTOM_CACHE_DIR", "MIOpen documentation, kernel cache"),
    Cache("miopen_db", "MIOPEN_USER_DB_PATH", "MIOpen documentation, find database"),
    Cache("flashinfer", "FLASHINFER_WORKSPACE_BASE", "flashinfer/jit/env.py"),
    Cache("matplotlib", "MPLCONFIGDIR", "Matplotlib documentation, environment variables", "*.matplotlib-lock"),
)

CACHE_NAMES: frozenset[str] = frozenset(cache.name for cache in CACHES)
