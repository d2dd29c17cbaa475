"""env.json: the code, versions and machine of a run. It is not part of the run's identity and contains no secrets."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import titanlab
from titanlab.system import parse_json, read_text, run_command

# File in a snapshot of the code: the git state of the repository from which the snapshot was made.
RECORD = "code.json"
PATCH_LIMIT = 1_000_000
_UNTRACKED_LIMIT = 100
_FILE_LIMIT = 200_000
_TIMEOUT_SECONDS = 5.0
# Flags with which `git diff` prints a patch for `git apply`, whatever the user's git settings are.
_DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/")
_CODE_SUFFIXES = (".py", ".pyi", ".yaml", ".yml", ".toml")


@dataclass(frozen=True, kw_only=True)
class GitState:
    """The commit, and how the code differs from it."""

    sha: str | None  # hash of the commit; None in a repository without commits
    branch: str | None  # None for a detached HEAD
    dirty: bool  # whether tracked files differ from the commit, or untracked code exists
    untracked: tuple[str, ...]  # untracked files with code
    patch: str  # applied to the commit (`git apply`) it gives this code, untracked code included
    patch_complete: bool  # False if the limit of size or time has cut the patch off


def git_state(package: Path) -> GitState | None:
    """The state of the repository that tracks a package; for a snapshot, the state recorded when it was made.

    None: the package is installed (even in a `.venv` inside another project's repository), or git is missing or slow.
    """
    root = package.resolve().parent
    if (root / RECORD).is_file():
        import msgspec

        try:
            return msgspec.convert(parse_json(read_text(root / RECORD))["git"], GitState | None)
        except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError):
            return None
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top.strip()).resolve() != root:
        return None
    sha = _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    branch = _git(root, "symbolic-ref", "--short", "--quiet", "HEAD")
    listed = _git(root, "ls-files", "--others", "--exclude-standard", "-z") or ""
    untracked = tuple(name for name in listed.split("\0") if name.endswith(_CODE_SUFFIXES))
    changed = _git(root, *_DIFF, "HEAD") if sha else ""
    patch, is_complete = changed or "", changed is not None and len(untracked) <= _UNTRACKED_LIMIT
    for name in untracked[:_UNTRACKED_LIMIT]:
        if len(patch) <= PATCH_LIMIT:
            added = _as_added(root, name)
            is_complete = is_complete and added is not None
            patch += added or ""
    if len(patch) > PATCH_LIMIT:
        patch, is_complete = patch[:PATCH_LIMIT].rpartition("\n")[0] + "\n", False
    return GitState(
        sha=sha.strip() if sha else None,
        branch=branch.strip() if branch else None,
        dirty=bool(untracked) or changed != "",
        untracked=untracked[:_UNTRACKED_LIMIT],
        patch=patch,
        patch_complete=is_complete,
    )


def _as_added(root: Path, name: str) -> str | None:
    """The patch that adds one file; None for a large file, or one that is not text in UTF-8."""
    try:
        if (root / name).stat().st_size > _FILE_LIMIT:
            return None
    except OSError:
        return None
    # git diff exits with 1 if the files differ.
    patch = _git(root, *_DIFF, "--no-index", "--", os.devnull, name, succeeds=(0, 1))
    # Bytes that are not UTF-8 became �: the patch would not restore the file.
    return None if patch is None or "\nBinary files " in patch or "�" in patch else patch


def _git(root: Path, *arguments: str, succeeds: Collection[int] = (0,)) -> str | None:
    """Output of a git command; None if it failed, took too long or git is not installed."""
    # Git sets GIT_DIR and similar variables for hooks; these would select another repository.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # Without this, git would lock the index, and the user's own git commands could fail.
    environ |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    # git refuses a repository of another owner, because its settings could run programs. Its code runs here anyway.
    trusted = ("-c", "safe.directory=*", "-c", "core.fsmonitor=false")
    words = ("git", *trusted, "-C", str(root), *arguments)
    answer = run_command(*words, seconds=_TIMEOUT_SECONDS, environ=environ)
    return answer.output if answer is not None and answer.code in succeeds else None


SCHEMA = 1
PACKAGES = (
    *("torch", "torchao", "triton", "numpy", "safetensors", "hydra-core", "omegaconf", "PyYAML", "submitit"),
    *("datasets", "huggingface-hub", "sentencepiece", "tokenizers", "pyarrow", "pandas"),
    *("wandb", "tensorboard", "rich", "matplotlib"),
)
# Environment variables that change what a training computes, or how fast. They are full names, because a pattern such
# as NCCL_* would also match a variable with a secret in it.
_VARIABLES = frozenset(
    """
    CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_DEVICE_MAX_CONNECTIONS CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING
    CUBLAS_WORKSPACE_CONFIG CUBLASLT_WORKSPACE_SIZE NVIDIA_TF32_OVERRIDE NCCL_ALGO NCCL_AVOID_RECORD_STREAMS
    NCCL_BUFFSIZE NCCL_COLLNET_ENABLE NCCL_CROSS_NIC NCCL_CTA_POLICY NCCL_CUMEM_ENABLE NCCL_CUMEM_HOST_ENABLE
    NCCL_DEBUG NCCL_DEBUG_SUBSYS NCCL_DMABUF_ENABLE NCCL_IB_ADAPTIVE_ROUTING NCCL_IB_DISABLE NCCL_IB_GID_INDEX
    NCCL_IB_HCA NCCL_IB_PCI_RELAXED_ORDERING NCCL_IB_QPS_PER_CONNECTION NCCL_IB_RETRY_CNT NCCL_IB_SL
    NCCL_IB_SPLIT_DATA_ON_QPS NCCL_IB_TC NCCL_IB_TIMEOUT NCCL_IGNORE_CPU_AFFINITY NCCL_LAUNCH_MODE NCCL_MAX_CTAS
    NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MIN_NCHANNELS NCCL_MNNVL_ENABLE NCCL_NET NCCL_NET_GDR_LEVEL
    NCCL_NET_GDR_READ NCCL_NET_PLUGIN NCCL_NSOCKS_PERTHREAD NCCL_NTHREADS NCCL_NVLS_ENABLE NCCL_P2P_DIRECT_DISABLE
    NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_PROTO NCCL_PXN_DISABLE NCCL_SHM_DISABLE NCCL_SOCKET_FAMILY
    NCCL_SOCKET_IFNAME NCCL_SOCKET_NTHREADS NCCL_TOPO_FILE NCCL_TUNER_PLUGIN NCCL_WORK_FIFO_DEPTH FI_EFA_FORK_SAFE
    FI_EFA_USE_DEVICE_RDMA FI_PROVIDER UCX_NET_DEVICES UCX_TLS GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME OMP_NUM_THREADS
    OMP_PROC_BIND OMP_PLACES OMP_SCHEDULE OMP_DYNAMIC OMP_WAIT_POLICY MKL_NUM_THREADS MKL_DYNAMIC MKL_CBWR
    MKL_ENABLE_INSTRUCTIONS KMP_AFFINITY KMP_BLOCKTIME OPENBLAS_NUM_THREADS TORCH_LOGS TORCH_COMPILE_DEBUG
    TORCH_COMPILE_DISABLE TORCHDYNAMO_DISABLE TORCH_DISTRIBUTED_DEBUG TORCH_CPP_LOG_LEVEL TORCH_SHOW_CPP_STACKTRACES
    TORCH_USE_CUDA_DSA TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TORCH_BLAS_PREFER_CUBLASLT TORCH_CUDNN_V8_API_DISABLED
    TORCH_FR_BUFFER_SIZE TORCH_SYMM_MEM_DISABLE_MULTICAST TORCH_NCCL_ASYNC_ERROR_HANDLING
    TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_ENABLE_MONITORING
    TORCH_NCCL_ENABLE_TIMING TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_HIGH_PRIORITY TORCH_NCCL_TRACE_BUFFER_SIZE
    TORCH_NCCL_USE_COMM_NONBLOCKING TORCHINDUCTOR_CACHE_DIR TORCHINDUCTOR_COMPILE_THREADS
    TORCHINDUCTOR_FORCE_DISABLE_CACHES TORCHINDUCTOR_FREEZING TORCHINDUCTOR_FX_GRAPH_CACHE
    TORCHINDUCTOR_MAX_AUTOTUNE TORCHINDUCTOR_MAX_AUTOTUNE_GEMM TORCHINDUCTOR_COORDINATE_DESCENT_TUNING
    PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_NO_CUDA_MEMORY_CACHING PYTORCH_NVML_BASED_CUDA_CHECK
    PYTORCH_JIT TRITON_CACHE_DIR TRITON_DEBUG TRITON_INTERPRET TOKENIZERS_PARALLELISM PYTHONHASHSEED RANK WORLD_SIZE
    LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TITANLAB_CACHE HF_HUB_OFFLINE HF_HOME LD_PRELOAD
    SLURM_JOB_ID SLURM_JOB_NAME SLURM_JOB_PARTITION SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_NTASKS SLURM_NNODES
    SLURM_NODEID SLURM_RESTART_COUNT SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID SLURM_CPUS_PER_TASK SLURM_GPUS_ON_NODE
    SLURM_CLUSTER_NAME SLURM_SUBMIT_HOST
    """.split()
)
# `token` only as a whole word: `tokenizers` and `tokens_seen` are not secrets.
_SECRET_NAME = (
    r"[\w.-]*(?:(?<![a-z])token(?![a-z])|(?:access|auth|hub|api)token|secret|passw(?:or)?d|passphrase|credential"
    r"|(?:api|access|private|auth)[_-]?key)[\w.-]*"
)
# Keys with a known form: Hugging Face, GitHub, OpenAI-like, wandb, AWS, Slack, a login in an address …
_SECRETS = (
    re.compile(
        r"()(\bhf_[A-Za-z0-9]{8,}|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}|\bsk-[\w-]{16,}|\bwandb_v1_\w{8,})"
    ),
    re.compile(r"()(\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bxox[abprs]-[\w-]{10,})"),
    re.compile(r"(\b[a-z][a-z0-9+.-]*://)([^/\s@]+)(?=@)"),
    # … an older wandb key, only after the word `wandb`, because a git commit also has 40 hexadecimal digits …
    re.compile(r"(?i)(wandb[^\n]{0,40}?\b)([0-9a-f]{40})\b"),
    # … and long literals with digits, assigned to a secret's name. Code such as `token = decode(x)` stays.
    re.compile(rf"(?i)(?<![\w.-])({_SECRET_NAME}[\"']?\s*[=:]\s*[\"']?)((?=[\w+/=-]*\d)[\w+/=-]{{16,}})"),
)
# In command lines, which contain no code, hide every value that is assigned to a secret's name.
_NAMED = re.compile(rf"(?i)(?<![\w.-])({_SECRET_NAME}[\"']?\s*[=:]\s*)([^\s,}}]+)")
_HIDDEN = "[hidden]"


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The content of env.json, and the patch from the commit to the code, of bounded size; None: no patch."""

    record: Mapping[str, Any]
    patch: str | None


def collect(
    *,
    devices: Mapping[str, Any],
    launcher: str,
    threads: int | None = None,
    arguments: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Provenance:
    """The provenance of a run of this process; takes about 50 ms.

    Args:
        devices: facts about the accelerators: name, count, memory_gib …
        launcher: the kind of program that started the ranks: `local`, `torchrun`, `slurm`.
        threads: number of torch's threads in each rank; None: no rank is started.
        arguments, environ: command line and environment variables; None: this process's.
    """
    package = Path(titanlab.__file__).parent
    git = git_state(package)
    patch = None if git is None or not git.patch else redact(git.patch)
    known = None if git is None else {**asdict(git), "patch": "code.patch" if git.patch else None}
    record = {
        "schema": SCHEMA,
        "time": time.time(),
        "command": redacted_arguments(sys.argv if arguments is None else arguments),
        "launcher": launcher,
        "code": {"version": titanlab.__version__, "fingerprint": code_fingerprint(package), "git": known},
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "packages": versions(PACKAGES),
        "platform": {
            "system": platform.system(),
            "release": platform.release(),
            "machine": platform.machine(),
            "libc": " ".join(platform.libc_ver()).strip(),
            "nvidia_driver": _found("/proc/driver/nvidia/version", r"\b(\d{3}\.\d+(?:\.\d+)?)\b"),
        },
        "host": _host(),
        "devices": dict(devices),
        "threads": threads,
        "environment": variables(os.environ if environ is None else environ),
    }
    return Provenance(record=record, patch=patch)


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those packages that are installed; none is imported."""
    installed = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that change a training, with secrets in their values hidden."""
    return {name: redact(value) for name, value in sorted(environ.items()) if name in _VARIABLES}


def redact(text: str) -> str:
    """The text without anything that looks like a password, key or token."""
    for pattern in _SECRETS:
        text = pattern.sub(lambda match: match[1] + _HIDDEN, text)
    return text


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line without secrets, even if an option and its value are separate arguments."""
    shown = []
    hides_next = False
    for argument in arguments:
        shown.append(_HIDDEN if hides_next else _NAMED.sub(lambda match: match[1] + _HIDDEN, redact(argument)))
        hides_next = bool(re.fullmatch(rf"--?{_SECRET_NAME}", argument, re.IGNORECASE))
    return shown


def code_fingerprint(package: Path) -> str:
    """Hash of a package's Python files: equal for runs of the same code, with git or without."""
    digest = hashlib.sha256()
    for path in sorted(path for path in package.rglob("*.py*") if path.suffix in (".py", ".pyi") and path.is_file()):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _host() -> dict[str, Any]:
    try:
        memory_gib = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 2)
    except (OSError, ValueError, AttributeError):
        memory_gib = None
    cores = os.cpu_count()
    return {
        "name": socket.gethostname(),
        "cpu": _cpu_model(),
        "cores": cores,
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores,
        "memory_gib": memory_gib,
    }


def _cpu_model() -> str:
    model = _found("/proc/cpuinfo", r"^(?:model name|Model|Processor|cpu model)\s*:\s*(.+)$")
    return model or platform.processor() or platform.machine()


def _found(path: str, pattern: str) -> str | None:
    """The match of a pattern in a file of the kernel; None if there is no such file."""
    try:
        match = re.search(pattern, Path(path).read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match[1].strip() if match else None
