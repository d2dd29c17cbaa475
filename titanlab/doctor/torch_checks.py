"""Whether torch can be imported, sees its devices, and can exchange tensors between processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlab.distributed.world import loopback_interface
from titanlab.system.command import ask
from titanlab.terminal.finding import Finding, fail, ok, warn

SCRIPT = Path(__file__).with_name("torch_script.py")
# Importing torch from a slow shared file system takes long.
FACTS_SECONDS = 90.0
REDUCE_SECONDS = 120.0
_KILL_SECONDS = 5.0


def torch_facts(*, python: str = sys.executable, seconds: float = FACTS_SECONDS) -> tuple[dict[str, Any], str]:
    """What torch knows, from a process of its own; or nothing, and why."""
    answer = ask(python, "-P", str(SCRIPT), "facts", seconds=seconds)
    if answer is None:
        return {}, f"gave no answer within {seconds:g} s"
    with contextlib.suppress(ValueError, IndexError):
        facts = json.loads(answer.output.splitlines()[-1])
        if isinstance(facts, dict):
            return facts, ""
    lines = answer.errors.strip().splitlines() or [f"exit code {answer.code}"]
    return {}, " ".join(lines[-1].split())[:300]


def check_torch(facts: Mapping[str, Any], problem: str) -> Iterator[Finding]:
    """The lines about torch, from what `torch_facts` has returned."""
    if not facts:
        yield fail("torch", f"cannot be used: {problem}", "install it again: see docs/torch.md for builds that fit")
        return
    build = f"CUDA {facts['cuda']}" if facts.get("cuda") else "ROCm" if facts.get("hip") else "CPU only"
    yield ok("torch", f"{facts['version']} ({build}), {facts['threads']} threads")
    if not facts.get("distributed") or not facts.get("gloo"):
        yield fail("gloo", "this build of torch has no gloo", "install a build with torch.distributed")
    if not facts.get("cuda_available"):
        if not facts.get("cpu_bf16", True):
            yield warn(
                "bf16", "this CPU has no units for it; tens of times slower than fp32", "use precision=fp32 here"
            )
        return
    yield from _check_devices(facts)


def _check_devices(facts: Mapping[str, Any]) -> Iterator[Finding]:
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
    """Whether code for `sm_80` runs on a device: on 8.0 and 8.6; `compute_80` on all later ones."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", architecture)
    if match is None:
        return False
    built = (int(match[2]), int(match[3]))
    return built <= (major, minor) and (match[1] == "compute" or built[0] == major)


def check_all_reduce(
    backend: str, world: int, *, python: str = sys.executable, seconds: float = REDUCE_SECONDS
) -> Finding:
    """Start processes that add up a tensor over all of them."""
    name = f"{backend} all-reduce"
    interface = loopback_interface()
    own = {"GLOO_SOCKET_IFNAME": interface} if interface and "GLOO_SOCKET_IFNAME" not in os.environ else {}
    with tempfile.TemporaryDirectory(prefix="titanlab-doctor-", ignore_cleanup_errors=True) as folder:
        command = [python, "-P", str(SCRIPT), "all_reduce", backend]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(world), f"{folder}/store"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **own, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(world)
        ]
        end, outputs, hung = time.monotonic() + seconds, [], False
        for process in ranks:
            try:
                outputs.append(process.communicate(timeout=max(0.1, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                hung = True
                for rank_process in ranks:
                    rank_process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=_KILL_SECONDS)
    if hung:
        hint = "a firewall, a proxy or a wrong network interface: see GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        return fail(name, f"{world} processes did not meet within {seconds:g} s", hint)
    failed = [process.returncode for process in ranks if process.returncode]
    results = [_result(output) for output, _ in outputs]
    if failed or any(result.get("total") != result.get("expected", 0) for result in results):
        lines = [line for _, errors in outputs for line in errors.decode(errors="replace").strip().splitlines()]
        text = " ".join(lines[-1].split())[:200] if lines else "the sum is wrong"
        return fail(name, text, "ranks of a run could not exchange gradients here either")
    return ok(name, f"{world} processes in {max(result['seconds'] for result in results):.2f} s")


def _result(output: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, IndexError):
        value = json.loads(output.decode(errors="replace").splitlines()[-1])
        if isinstance(value, dict):
            return value
    return {}
