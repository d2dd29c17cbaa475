"""Speed of saving and loading checkpoints beside plain writers and readers of the same bytes, in turns.

Every process writes the same number of bytes in both cases and waits until they are on the disk; before a read, the
kernel is asked to forget the files. Prints one JSON object: medians in seconds, and speeds as ratios (ours / plain).
It also measures how long an index of many chunks takes to write and to read.

    python benchmarks/checkpoint_io.py                     1 GB over two processes
    python benchmarks/checkpoint_io.py --megabytes 200 --processes 1 --pairs 3
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from titanlab.checkpoint import SavedPosition, load_state, read_contents
from titanlab.checkpoint.index import IndexedFile, IndexEntry, index_bytes, read_index
from titanlab.checkpoint.saving import Plans
from titanlab.checkpoint.storage import sync_folder
from titanlab.distributed import World

MEGABYTE = 1_000_000
# The width of a matrix; each has 16 MB.
COLUMNS = 1000
PLAIN_WRITE = 4 << 20


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--chunks", type=int, default=300_000, help="of the index")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: for temporary files)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        torch.multiprocessing.spawn(  # type: ignore[attr-defined,no-untyped-call]
            _rank, (given, Path(folder), port), nprocs=given.processes
        )
        result = json.loads((Path(folder) / "result.json").read_text())
        result["index"] = _index(Path(folder), given.chunks)
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "torch": torch.__version__,
        **result,
    }
    print(json.dumps(result, indent=2))


def _rank(rank: int, given: argparse.Namespace, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=given.processes)
    world = World(rank=rank, world=given.processes, local_rank=rank, device=torch.device("cpu"))
    state = _state(given.megabytes, given.processes)
    size = sum(tensor.to_local().nbytes for tensor in state.values())
    target = bytearray(size)
    ours, plain = folder / "ours", folder / "plain"
    seconds: dict[str, list[float]] = {}
    for _ in range(given.pairs):
        for name, path, action in (
            ("save", ours, lambda: _save(state, ours, world)),
            ("plain_write", plain, lambda: _write(state, plain, rank)),
            ("load", ours, lambda: _load(state, ours, world)),
            ("plain_read", plain, lambda: _read(plain, rank, target)),
        ):
            if name in ("save", "plain_write") and rank == 0:
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
            if name in ("load", "plain_read"):
                _forget(path)
            seconds.setdefault(name, []).append(_timed(action))
    if rank == 0:
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        ratios = {
            "save": medians["plain_write"] / medians["save"],
            "load": medians["plain_read"] / medians["load"],
        }
        result: dict[str, Any] = {"bytes": size * given.processes, "processes": given.processes}
        result |= {"seconds": medians, "all_seconds": seconds, "speed_ratio": ratios}
        (folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def _state(megabytes: int, processes: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (processes,))
    rows = 16 * MEGABYTE // (4 * COLUMNS)
    count = max(1, megabytes // 16)
    return {
        f"model.{number}": distribute_tensor(torch.rand(rows, COLUMNS), mesh, [Shard(0)]) for number in range(count)
    }


def _timed(action: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def _save(state: dict[str, Any], folder: Path, world: World) -> None:
    save = Plans().start(lambda: state, lambda: folder, SavedPosition(step=0, parameters={}), world)
    save.complete(save.stage, world)
    if world.logs:
        sync_folder(folder)


def _write(state: dict[str, Any], folder: Path, rank: int) -> None:
    with (folder / str(rank)).open("wb", buffering=0) as file:
        for tensor in state.values():
            content = memoryview(tensor.to_local().view(torch.uint8).numpy()).cast("B")
            for start in range(0, len(content), PLAIN_WRITE):
                file.write(content[start : start + PLAIN_WRITE])
        os.fsync(file.fileno())
    sync_folder(folder)


def _load(state: dict[str, Any], folder: Path, world: World) -> None:
    load_state(state, read_contents(folder, "run"), world)


def _read(folder: Path, rank: int, target: bytearray) -> None:
    rest = memoryview(target)
    with (folder / str(rank)).open("rb", buffering=0) as file:
        while len(rest):
            count = file.readinto(rest[:PLAIN_WRITE])
            rest = rest[count:]


def _forget(folder: Path) -> None:
    """Ask the kernel to drop the files from its cache; their bytes are on the disk."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _index(folder: Path, chunks: int) -> dict[str, float]:
    """Seconds for an index of tensors that are cut along two dims, 512 chunks each."""
    across, along, size = 8, 64, 1 << 20
    count = max(1, chunks // 512)
    files = [
        IndexedFile(name=f"rank-{rank:05d}.safetensors", size=count * size, checksums=bytes(8 * count))
        for rank in range(across * along)
    ]
    height, width = 512, 512
    tensors = {
        f"optimizer.state.layers.{number}.exp_avg": IndexEntry(
            "float32",
            [height * along, width * across],
            [
                [row * across + column, number * size, size, row * height, column * width, height, width]
                for row in range(along)
                for column in range(across)
            ],
        )
        for number in range(count)
    }
    start = time.perf_counter()
    content = index_bytes(position=b"{}", objects={}, tensors=tensors, files=files)
    written = time.perf_counter() - start
    (folder / "index.json").write_bytes(content)
    start = time.perf_counter()
    read_index(folder)
    return {
        "chunks": count * 512,
        "megabytes": len(content) / MEGABYTE,
        "encode_seconds": written,
        "read_seconds": time.perf_counter() - start,
    }


if __name__ == "__main__":
    main()
