"""Every environment variable that safedist reads or sets, once, with its source.

Constants only: whoever needs one reads it from a mapping that is handed in.
"""

from __future__ import annotations

# --- who a rank is, and where ranks meet --------------------------------------------------------------------------
RANK = "RANK"
LOCAL_RANK = "LOCAL_RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
GROUP_RANK = "GROUP_RANK"
GROUP_WORLD_SIZE = "GROUP_WORLD_SIZE"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
"""torch.distributed's env:// initialisation and torchrun's documented environment
(https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables)."""

NODE_RANK = "NODE_RANK"
"""GROUP_RANK as composer's launcher calls it, and as MosaicML Composer wants it (composer/utils/dist.py)."""
ROLE_NAME = "ROLE_NAME"
ROLE_RANK = "ROLE_RANK"
ROLE_WORLD_SIZE = "ROLE_WORLD_SIZE"
TORCHELASTIC_RUN_ID = "TORCHELASTIC_RUN_ID"
TORCHELASTIC_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
TORCHELASTIC_USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
TORCHELASTIC_MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"

HOROVOD_RANK = "HOROVOD_RANK"
HOROVOD_SIZE = "HOROVOD_SIZE"
HOROVOD_LOCAL_RANK = "HOROVOD_LOCAL_RANK"
HOROVOD_LOCAL_SIZE = "HOROVOD_LOCAL_SIZE"
HOROVOD_CROSS_RANK = "HOROVOD_CROSS_RANK"
HOROVOD_CROSS_SIZE = "HOROVOD_CROSS_SIZE"
HOROVOD_HOSTNAME = "HOROVOD_HOSTNAME"
HOROVOD_CONTROLLER = "HOROVOD_CONTROLLER"
HOROVOD_GLOO_RENDEZVOUS_ADDR = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
HOROVOD_GLOO_RENDEZVOUS_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
"""Horovod: horovod/runner/gloo_run.py (create_slot_env_vars) and horovod/common/gloo/gloo_context.cc, 0.28.1."""

IDENTITY = frozenset(value for name, value in list(globals().items()) if name.isupper())
"""All of these: safedist decides them, and a task config that sets one is refused."""

# --- set in every rank ---------------------------------------------------------------------------------------------
HOROVOD_CPU_OPERATIONS = "HOROVOD_CPU_OPERATIONS"
HOROVOD_GLOO_TIMEOUT_SECONDS = "HOROVOD_GLOO_TIMEOUT_SECONDS"
HOROVOD_GLOO_IFACE = "HOROVOD_GLOO_IFACE"
"""Horovod's, as above."""
TORCHELASTIC_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
TORCH_NCCL_ASYNC_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
TORCH_FR_BUFFER_SIZE = "TORCH_FR_BUFFER_SIZE"
TORCH_NCCL_TRACE_BUFFER_SIZE = "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""How many operations torch's flight recorders remember (pytorch: torch/csrc/distributed/c10d/FlightRecorder.hpp)."""
OMP_NUM_THREADS = "OMP_NUM_THREADS"
TMPDIR = "TMPDIR"

# --- ours, settable by users and platform engineers ---------------------------------------------------------------
SCRATCH_ROOT = "SAFEDIST_SCRATCH_ROOT"
"""Directory under which job scratch directories are made, when the task's ``Scratch(path=...)`` does not say."""

# --- ours, pinned into the pod at serialization; the entrypoint compares them with what it finds -------------------
JOB = "SAFEDIST_JOB"
"""The job as it was registered, in JSON (:class:`~flytekitplugins_safedist.config.registered.Registered`)."""
EPHEMERAL_STORAGE = "SAFEDIST_EPHEMERAL_STORAGE"
"""Bytes of its node's disk that the container may use before the kubelet evicts its pod; without a limit of its own,
what the node has. Filled in by Kubernetes (a ``resourceFieldRef``), so that it holds whatever changed the limit."""
KUBERNETES_NODE = "SAFEDIST_KUBERNETES_NODE"
"""The machine that Kubernetes has put the pod on (``spec.nodeName``), which a pod is not told otherwise."""
GRACE = "SAFEDIST_GRACE_SECONDS"
"""The pod's ``terminationGracePeriodSeconds``, which a pod is not told otherwise. Beside it in the pod template."""

# --- Flyte (flytekit.bin.entrypoint.setup_execution reads the same) ------------------------------------------------
FLYTE_EXECUTION_ID = "FLYTE_INTERNAL_EXECUTION_ID"
FLYTE_ATTEMPT = "FLYTE_ATTEMPT_NUMBER"
"""Retry attempt, from 0 (flyteplugins/go/tasks/pluginmachinery/flytek8s/k8s_resource_adds.go)."""

FLYTE_FAIL_ON_ERROR = "FLYTE_FAIL_ON_ERROR"
"""flytekit's: exit with 1 after the upload of an error, as some platforms' own consoles want it."""

# --- topology: ours, then each operator's (sources: topology/adapters.py) -------------------------------------------
ENDPOINT = "SAFEDIST_ENDPOINT"
"""HOST:PORT at which the nodes meet, when the user knows better than the operator. Settable by users."""
PET_NODE_RANK = "PET_NODE_RANK"
PET_NNODES = "PET_NNODES"
PET_NPROC_PER_NODE = "PET_NPROC_PER_NODE"
PET_RDZV_ENDPOINT = "PET_RDZV_ENDPOINT"

# --- file-system helpers (fs): ours, settable by users -------------------------------------------------------------
MEETING = "SAFEDIST_MEETING"
"""Set in the ranks of a job of several: the socket at which their agent carries what ranks tell each other to the job's
leader. Not torchrun's agent store: a user's own store would meet ours in it."""
STORE_PORT = "SAFEDIST_STORE_PORT"
"""Set in torch's ranks: the port, at MASTER_ADDR, of the store that they meet at. MASTER_PORT is what they start by
themselves meets at, as anywhere."""
ROUND = "SAFEDIST_ROUND"
"""Set in every rank: which launch of the ranks this is, from 0."""
FS_TIMEOUT = "SAFEDIST_FS_TIMEOUT"
"""Seconds that the helpers of ``flytekitplugins_safedist.fs`` wait for other ranks, unless a call says otherwise."""

# --- staged code: ours ---------------------------------------------------------------------------------------------
CODE_MAX_BYTES = "SAFEDIST_CODE_MAX_BYTES"
CODE_MAX_FILES = "SAFEDIST_CODE_MAX_FILES"
CODE_MAX_RATIO = "SAFEDIST_CODE_MAX_RATIO"
"""Limits on a code archive (:class:`~flytekitplugins_safedist.pod.staging.Options`). Set by users."""
CODE_TIMEOUT = "SAFEDIST_CODE_TIMEOUT"
"""Seconds that staging may wait for the store, where it is not the task's ``Timeouts(code=...)``. Set by users."""
NVIDIA_VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""GPUs of this container, by NVIDIA's device plugin (a list, or "all", "none", "void"), and those a user narrows to."""
