"""What nvidia-smi says of the GPUs and of the links between them."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections import Counter
from collections.abc import Iterator

from titanlab.system.command import ask
from titanlab.terminal.finding import Finding, fail, ok, warn

_SECONDS = 20.0
_FIELDS = ("index", "name", "driver_version", "memory.used", "memory.total", "ecc.errors.uncorrected.volatile.total")
_USED_MIB = 1024
# Words of `nvidia-smi topo -m`, from the fastest link to the slowest.
_LINKS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "PCIe switches",
    "PHB": "a PCIe host bridge",
    "NODE": "PCIe within a NUMA node",
    "SYS": "the link between sockets",
}


def check_gpus() -> Iterator[Finding]:
    """Driver, memory in use, memory errors, links."""
    if shutil.which("nvidia-smi") is None:
        yield ok("GPUs", "there is no nvidia-smi on PATH: processes compute on the CPU")
        return
    answer = ask("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits", seconds=_SECONDS)
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
    used = [f"{row[0]} ({row[3]} MiB)" for row in rows if _number(row[3]) > _USED_MIB]
    if used:
        hint = "another process uses them: see `nvidia-smi`; a run there is slower, or runs out of memory"
        yield warn("GPU memory", f"in use on {', '.join(used)}", hint)
    errors = [f"{row[0]} ({row[5]})" for row in rows if _number(row[5]) > 0]
    if errors:
        hint = "have the GPU reset or replaced; leave it out with CUDA_VISIBLE_DEVICES"
        yield fail("GPU memory errors", f"uncorrected on {', '.join(errors)}", hint)
    if len(rows) > 1:
        yield _links()


def _links() -> Finding:
    answer = ask("nvidia-smi", "topo", "-m", seconds=_SECONDS)
    links = Counter(links_of(answer.output)) if answer is not None and answer.code == 0 else Counter[str]()
    if not links:
        return warn("links", "nvidia-smi topo -m says nothing", "the links between GPUs are not known")
    kinds = ", ".join(f"{_word(link)} ({link}) for {count}" for link, count in links.most_common())
    text = f"of {links.total()} pairs: {kinds}"
    if all(link.startswith("NV") for link in links):
        return ok("links", text)
    return warn("links", text, "tensor and context parallelism are slow across pairs without NVLink")


def links_of(text: str) -> list[str]:
    """The link of each pair of GPUs in the matrix that `nvidia-smi topo -m` prints."""
    # Terminals get underlined headings.
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    rows = {
        int(line[0][3:]): line[1:]
        for line in lines
        if len(line) > 1 and re.fullmatch(r"GPU\d+", line[0]) and "X" in line
    }
    links = []
    for number, cells in rows.items():
        later = cells[number + 1 : len(rows)]
        links += [cell for cell in later if re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", cell)]
    return links


def _word(link: str) -> str:
    return _LINKS["NV" if link.startswith("NV") else link]


def _number(text: str) -> float:
    with contextlib.suppress(ValueError):
        return float(text)
    return 0.0  # `[N/A]`
