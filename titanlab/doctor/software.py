"""Checks of software and devices: Python, packages against the tested ones, git, trackers, torch, nvidia-smi."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

import titanlab
from titanlab.distributed import loopback_interface
from titanlab.doctor.host import graded
from titanlab.records import PACKAGES, git_state, versions
from titanlab.system import Finding, fail, ok, run_command, warn
from titanlab.techniques.tracker.wandb import has_key

_LEAST = (3, 11)
_PINNED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==(\S+)")


def check_python() -> Iterator[Finding]:
    """Findings about the interpreter, and about packages whose versions differ from the tested ones."""
    hint = f"titanlab needs {'.'.join(map(str, _LEAST))} or later"
    text = f"{platform.python_version()}, {sys.executable}"
    yield graded("Python", text, hint, fails=sys.version_info < _LEAST)
    yield ok("titanlab", f"{titanlab.__version__}, {Path(titanlab.__file__).parent}")
    tested, installed = tested_versions(), versions(PACKAGES)
    # Compare without the local part of versions: 2.13.0+cpu is built from 2.13.0.
    others = [
        f"{name} {have} (tested: {tested[canonicalize_name(name)]})"
        for name, have in installed.items()
        if have.partition("+")[0] != tested.get(canonicalize_name(name), have).partition("+")[0]
    ]
    text = "; ".join(others) or f"{len(installed)} are those that were tested"
    if not tested:
        text = "the set that was tested is not in this installation"
    hint = "most other versions work; for the set that was tested: pip install -c constraints.txt"
    yield graded("packages", text, hint, warns=bool(others))


def tested_versions() -> dict[str, str]:
    """The versions in constraints.txt (in a wheel inside the package, in a clone beside it); empty: no such file."""
    package = Path(titanlab.__file__).parent
    for path in (package / "constraints.txt", package.parent / "constraints.txt"):
        with contextlib.suppress(OSError):
            matches = map(_PINNED.match, path.read_text(encoding="utf-8").splitlines())
            return {canonicalize_name(match[1]): match[2] for match in matches if match}
    return {}


def check_code() -> Iterator[Finding]:
    """A finding about whether runs can record their code completely."""
    state = git_state(Path(titanlab.__file__).parent)
    if state is None:
        yield ok("code", "no git repository: runs record the version and a fingerprint of the code")
        return
    is_lost = state.dirty and not state.patch_complete
    how = "changed by more than runs keep" if is_lost else "changed; runs keep the difference"
    how = how if state.dirty else "as committed"
    hint = "commit the changes: runs keep only a part of such a large difference, so titanlab repro cannot restore it"
    yield graded("code", f"commit {str(state.sha)[:12]}, {how}", hint, warns=is_lost)


def check_wandb(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """A finding about whether tracker=wandb would upload."""
    if not versions(["wandb"]):
        yield ok("wandb", "is not installed: sweeps keep metrics.jsonl only")
        return
    mode = environ.get("WANDB_MODE", "")
    if mode in ("offline", "dryrun"):
        yield ok("wandb", f"WANDB_MODE={mode}: files are kept; titanlab sync uploads them")
    elif mode == "disabled":
        hint = "unset WANDB_MODE, or set it to offline"
        yield warn("wandb", "WANDB_MODE=disabled: tracker=wandb records nothing", hint)
    elif has_key(environ):
        yield ok("wandb", "an API key is there")
    else:
        yield ok("wandb", "no API key: tracker=wandb works offline; later `wandb login`, and titanlab sync")


SCRIPT = Path(__file__).with_name("torch_script.py")
# Importing torch from a slow shared file system takes long.
FACTS_SECONDS = 90.0
REDUCE_SECONDS = 120.0


def run_script(
    *words: str, python: str = sys.executable, seconds: float, environ: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], str]:
    """The values that the script prints, and an empty text; or no values, and the reason."""
    answer = run_command(python, "-P", str(SCRIPT), *words, seconds=seconds, environ=environ)
    if answer is None:
        return {}, f"gave no answer within {seconds:g} s"
    with contextlib.suppress(ValueError, IndexError):
        values = json.loads(answer.output.splitlines()[-1])
        if isinstance(values, dict):
            return values, ""
    lines = answer.errors.strip().splitlines() or [f"exit code {answer.code}"]
    return {}, " ".join(lines[-1].split())[:300]


def check_torch_here() -> Iterator[Finding]:
    facts, problem = run_script("facts", seconds=FACTS_SECONDS)
    yield from check_torch(facts, problem)
    if facts.get("gloo"):
        yield check_all_reduce("gloo", 2)
    if facts.get("nccl") and facts.get("devices"):
        yield check_all_reduce("nccl", len(facts["devices"]))


def check_torch(facts: Mapping[str, Any], problem: str) -> Iterator[Finding]:
    if not facts:
        yield fail("torch", f"cannot be used: {problem}", "install it again: see docs/torch.md for builds that fit")
        return
    build = f"CUDA {facts['cuda']}" if facts.get("cuda") else "ROCm" if facts.get("hip") else "CPU only"
    yield ok("torch", f"{facts['version']} ({build}), {facts['threads']} threads")
    if not facts.get("distributed") or not facts.get("gloo"):
        yield fail("gloo", "this build of torch has no gloo", "install a build with torch.distributed")
    if not facts.get("cuda_available"):
        if not facts.get("cpu_bf16", True):
            text = "this CPU has no units for it; tens of times slower than fp32"
            yield warn("bf16", text, "use precision=fp32 here")
        return
    devices: Sequence[Mapping[str, Any]] = facts["devices"]
    names = sorted({device["name"] for device in devices})
    memory = sorted({device["memory_gib"] for device in devices})
    text = f"{len(devices)} × {' / '.join(names)}, {' / '.join(f'{size:g}' for size in memory)} GiB"
    if len(names) > 1:
        yield warn("CUDA", text, "the devices differ: the slowest sets the pace; choose with CUDA_VISIBLE_DEVICES")
    elif facts.get("product") != 64.0**3:
        yield fail("CUDA", f"{text}; a matrix product is wrong", "a device or its driver is broken: leave it out")
    else:
        yield ok("CUDA", text)
    built: Sequence[str] = facts.get("architectures", [])
    for major, minor in sorted({tuple(device["capability"]) for device in devices}):
        if built and not any(_runs_on(architecture, major, minor) for architecture in built):
            text = f"torch was built for {', '.join(built)}, and a device has {major}.{minor}"
            yield fail("CUDA build", text, "install a build of torch for this device")
    if not facts.get("nccl"):
        yield fail("NCCL", "this build of torch has none", "install a build with NCCL")
    elif len(devices) > 1 and any(len(device["peers"]) < len(devices) - 1 for device in devices):
        text = f"{facts.get('nccl_version')}; some GPUs cannot read each other's memory"
        yield warn("NCCL", text, "exchange goes through the host: see `nvidia-smi topo -m`, and IOMMU and ACS settings")
    else:
        yield ok("NCCL", str(facts.get("nccl_version")))


def _runs_on(architecture: str, major: int, minor: int) -> bool:
    """Whether code for an architecture runs on a device: `sm_80` on 8.0 and 8.6, `compute_80` on all later ones."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", architecture)
    if match is None:
        return False
    built = (int(match[2]), int(match[3]))
    return built <= (major, minor) and (match[1] == "compute" or built[0] == major)


def check_all_reduce(
    backend: str, world: int, *, python: str = sys.executable, seconds: float = REDUCE_SECONDS
) -> Finding:
    """Check an all-reduce between processes."""
    name, interface = f"{backend} all-reduce", loopback_interface()
    own = {"GLOO_SOCKET_IFNAME": interface} if interface and "GLOO_SOCKET_IFNAME" not in os.environ else {}
    environ = {**os.environ, **own, "OMP_NUM_THREADS": "1"}
    result, problem = run_script("all_reduce", backend, str(world), python=python, seconds=seconds, environ=environ)
    if problem.startswith("gave no answer"):
        hint = "a firewall, a proxy or a wrong network interface: see GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        return fail(name, f"{world} processes did not meet within {seconds:g} s", hint)
    if problem or result.get("totals") != [world * (world + 1) / 2] * world:
        return fail(name, problem or "the sum is wrong", "ranks of a run could not exchange gradients here either")
    return ok(name, f"{world} processes in {result['seconds']:.2f} s")


_SECONDS = 20.0
_FIELDS = ("index", "name", "driver_version", "memory.used", "memory.total", "ecc.errors.uncorrected.volatile.total")
_USED_MIB = 1024


def check_gpus() -> Iterator[Finding]:
    """Findings of nvidia-smi about the driver, memory in use and memory errors."""
    if shutil.which("nvidia-smi") is None:
        yield ok("GPUs", "there is no nvidia-smi on PATH: processes compute on the CPU")
        return
    query = f"--query-gpu={','.join(_FIELDS)}"
    answer = run_command("nvidia-smi", query, "--format=csv,noheader,nounits", seconds=_SECONDS)
    if answer is None:
        text = f"nvidia-smi gave no answer within {_SECONDS:g} s"
        yield fail("GPUs", text, "the driver hangs: see the kernel's log (dmesg) for Xid, and restart the node")
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.output.splitlines() if line.strip()]
    rows = [row for row in rows if len(row) == len(_FIELDS) and row[0].isdecimal()]
    if answer.code or not rows:
        yield fail("GPUs", f"nvidia-smi says: {answer.complaint[:200]}", "see that driver and kernel module fit")
        return
    names = ", ".join(f"{count} × {name}" for name, count in Counter(row[1] for row in rows).items())
    yield ok("GPUs", f"{names}, driver {rows[0][2]}")
    used = [f"GPU {row[0]} ({row[3]} MiB)" for row in rows if _number(row[3]) > _USED_MIB]
    if used:
        hint = "another process uses them, as `nvidia-smi` shows; a run there is slower, or runs out of memory"
        yield warn("GPU memory", f"in use on {', '.join(used)}", hint)
    errors = [f"GPU {row[0]} ({row[5]})" for row in rows if _number(row[5]) > 0]
    if errors:
        hint = "have the GPU reset or replaced; leave it out with CUDA_VISIBLE_DEVICES"
        yield fail("GPU memory errors", f"uncorrected on {', '.join(errors)}", hint)


def _number(text: str) -> float:
    with contextlib.suppress(ValueError):
        return float(text)
    return 0.0  # nvidia-smi writes `[N/A]`
