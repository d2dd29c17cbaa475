"""Writes states as checkpoints and reads them, without a model, an optimizer and a run."""

from __future__ import annotations

import json
from unittest.mock import patch

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.checkpoint.one_process import ALONE
from titanlab.checkpoint import ITEM_BYTES, SavedPosition, load_state, read_contents, storage
from titanlab.checkpoint.index import signed
from titanlab.checkpoint.saving import HostBuffer, Plans
from titanlab.checkpoint.storage import checksum


def started(state, folder, *, plans=None, world=ALONE):
    """A save of a state, without a model."""
    saved = SavedPosition(step=0, parameters={})
    return (plans or Plans()).start(lambda: state, lambda: folder, saved, world)


def write(state, folder, *, copies=False, world=ALONE):
    folder.mkdir(exist_ok=True)
    save = started(state, folder, world=world)
    staged = save.stage(HostBuffer() if copies else None)
    save.complete(lambda: staged, world)


def rewritten(checkpoint, change):
    """Change the position in a checkpoint, with checksums that fit."""
    position = json.loads((checkpoint / "position.json").read_bytes())
    change(position)
    content = json.dumps(position).encode()
    (checkpoint / "position.json").write_bytes(content)
    index = json.loads((checkpoint / "index.json").read_bytes())
    del index["checksum"]
    index["position"] = {"bytes": len(content), "checksum": f"{checksum(content):016x}"}
    (checkpoint / "index.json").write_bytes(signed(json.dumps(index, separators=(",", ":")).encode()))


def read(state, folder):
    """Fill a state dict in this process. Returns the number of blocks that were read."""
    contents = read_contents(folder, "run")
    with patch.object(storage, "checksum", wraps=checksum) as verified:
        load_state(state, contents)
    return verified.call_count


def of_every_dtype():
    """Tensors of every dtype and of shapes that are easy to get wrong, with random bytes."""
    torch.manual_seed(0)
    state = {}
    for name, size in ITEM_BYTES.items():
        for shape in [(), (0,), (3, 0, 2), (5,), (3, 4)]:
            count = size * int(torch.tensor(shape).prod()) if shape else size
            raw = torch.randint(0, 2 if name == "bool" else 256, (count,), dtype=torch.uint8)
            state[f"{name} {list(shape)}"] = raw.view(getattr(torch, name)).view(shape)
    return state


def sharded_state(mesh, sharding, *, filled):
    """Two matrices of 6 MiB, a vector that two ranks cannot share equally, and an empty one."""
    shapes = {"rows": (1024, 1536), "columns": (1536, 1024), "odd": (3, 5), "replicated": (7,)}
    state = {}
    for number, (name, shape) in enumerate(shapes.items()):
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + number
        whole = whole if filled else torch.full_like(whole, -1)
        state[name] = distribute_tensor(whole, mesh, [sharding.get(name, Replicate())])
    return state, shapes


SHARDINGS = {
    "rows": {"rows": Shard(0), "columns": Shard(0), "odd": Shard(0)},
    "columns": {"rows": Shard(1), "columns": Shard(1), "odd": Shard(1)},
    "none": {},
}
