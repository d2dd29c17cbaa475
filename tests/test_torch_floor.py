"""What the package takes from torch is in the oldest torch it supports: `torch_names.txt` lists it, reviewed.

Names are collected from the source, so that what only runs on GPUs is seen too. Run under the oldest torch, these tests
review the list: docs/torch.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import titanlab
from tests.torch_names import GUARDED, OURS, Entry, Reader, lacking, read, reviewed, stale, unknown

PACKAGE = Path(titanlab.__file__).parent
LIST = Path(__file__).with_name("torch_names.txt")


@pytest.fixture(scope="module")
def package() -> dict[str, Reader]:
    return {str(path.relative_to(PACKAGE.parent)): read(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.fixture(scope="module")
def entries() -> dict[str, Entry]:
    return reviewed(LIST.read_text())


def floor() -> tuple[int, ...]:
    """The oldest torch that pyproject.toml admits."""
    (found,) = re.findall(r'"torch>=([\d.]+)"', (PACKAGE.parent / "pyproject.toml").read_text())
    return version(found)


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def test_every_name_of_torch_is_reviewed(package: dict[str, Reader], entries: dict[str, Entry]) -> None:
    found = {
        f"{path}:{use.line}: {what}" for path, r in package.items() for use in r.uses if (what := unknown(use, entries))
    }
    text = "\n".join(sorted(found))
    assert not found, f"not in {LIST.name}; docs/torch.md says how to review a name:\n{text}"


def test_the_list_has_nothing_that_is_no_longer_used(package: dict[str, Reader], entries: dict[str, Entry]) -> None:
    text = "\n".join(stale(entries, package.values()))
    assert not text, f"delete from {LIST.name}, it is no longer used:\n{text}"


def test_what_is_listed_is_in_the_oldest_torch(entries: dict[str, Entry]) -> None:
    late = [
        name for name, entry in entries.items() if entry.since not in (GUARDED, OURS) and version(entry.since) > floor()
    ]
    assert not late, (
        f"younger than torch {'.'.join(map(str, floor()))}: look it up with getattr, and list it as {GUARDED}"
    )


def test_the_installed_torch_has_what_is_listed(entries: dict[str, Entry]) -> None:
    # Under the oldest torch this is the review of the list.
    missing = [what for name, entry in entries.items() if (what := lacking(name, entry))]
    assert not missing, f"torch {torch.__version__} does not have: {', '.join(missing)}"


def found_in(source: str, listed: str) -> list[str]:
    return sorted({what for use in read(source).uses if (what := unknown(use, reviewed(listed)))})


LISTED = """
torch.distributed 2.11
torch.distributed.all_gather_single guarded
torch.distributed.fsdp.fully_shard 2.11 mesh
torch.distributed.fsdp.FSDPModule.reshard 2.11
torch.distributed.pipelining.PipelineStage 2.11
torch.ops.aten.mm.default 2.11 #2
"""
PLANTED = {
    "import torch.distributed as dist\ndist.all_gather_single(a, b)": ["torch.distributed.all_gather_single"],
    "import torch.distributed as dist\ngather = getattr(dist, 'all_gather_single')": ["torch.distributed.all_gather_single"],
    "import torch.distributed as dist\ngather = getattr(dist, 'all_gather_single', None) or old": [],
    "import torch.distributed as dist\nif hasattr(dist, 'all_gather_single'):\n  dist.all_gather_single(a)": [],
    "import torch.distributed as dist\nif hasattr(dist, 'all_gather_single'):\n  pass\nelse:\n  dist.all_gather_single(a)": [
        "torch.distributed.all_gather_single"
    ],
    "from torch.distributed.fsdp import fully_shard as shard\nshard(model, mesh=mesh, dp_mesh_dims=dims)": [
        "torch.distributed.fsdp.fully_shard called with dp_mesh_dims"
    ],
    "import functools\nfrom torch.distributed.fsdp import fully_shard\nfunctools.partial(fully_shard, dp_mesh_dims=1)": [
        "torch.distributed.fsdp.fully_shard called with dp_mesh_dims"
    ],
    "from functools import partial\nfrom torch.distributed.fsdp import fully_shard\nshard = partial(fully_shard)\nshard(m, dp_mesh_dims=1)": [
        "torch.distributed.fsdp.fully_shard called with dp_mesh_dims"
    ],
    "def shard(x):\n  from torch.distributed.fsdp import DataParallelMeshDims": [
        "torch.distributed.fsdp.DataParallelMeshDims"
    ],
    "from torch.distributed.fsdp import fully_shard\nx.reshard().set_is_last_backward(True)": [
        "torch.distributed.fsdp.FSDPModule.set_is_last_backward"
    ],
    "from torch.distributed.pipelining import PipelineStage\nclass S(PipelineStage):\n  def get_fwd_send_ops(self): pass": [
        "torch.distributed.pipelining.PipelineStage.get_fwd_send_ops"
    ],
    "import torch.distributed\naten = torch.ops.aten\ndef f():\n  op = aten.mm.default\n  op(a, b, c)": [
        "torch.ops.aten",
        "torch.ops.aten.mm.default called with #3",
    ],
    "import torch.distributed\ntorch.distributed.nothing_of_the_kind.at_all": [
        "torch.distributed.nothing_of_the_kind.at_all"
    ],
}  # fmt: skip


@pytest.mark.parametrize("source", PLANTED)
def test_what_an_older_torch_may_lack_is_found(source: str) -> None:
    assert found_in(source, LISTED) == PLANTED[source]


def test_what_the_list_claims_wrongly_is_found() -> None:
    wrong = {
        "torch.no_such_name": "torch.no_such_name",
        "torch.zeros shape dtype": "torch.zeros called with shape",
        "torch.distributed.fsdp.fully_shard mesh speed": "torch.distributed.fsdp.fully_shard called with speed",
        "torch.distributed.fsdp.FSDPModule.no_such_method": "torch.distributed.fsdp.FSDPModule.no_such_method",
        "torch.ops.aten.mm.default #2 #9": "torch.ops.aten.mm.default called with #9",
        "torch.distributed.pipelining.PipelineStage.submod": None,
    }
    for line, expected in wrong.items():
        name, *arguments = line.split()
        assert lacking(name, Entry("2.11", frozenset(arguments))) == expected
    listed = reviewed("torch.zeros 2.11 dtype\ntorch.ones 2.11\ntorch.Tensor.t 2.11\n.deep ours\n")
    assert list(stale(listed, [read("import torch\ntorch.zeros(2)\nx.t()")])) == [
        "torch.zeros dtype",
        "torch.ones",
        ".deep",
    ]
