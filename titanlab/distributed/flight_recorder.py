"""Reads torch's Flight Recorder: the last collectives of this process, as plain values.

torch keeps the last TORCH_FR_BUFFER_SIZE collectives in a ring in memory. Only dumps in JSON are read: the others are
pickles. With gloo torch 2.13 records no sends and receives, and no times.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from titanlab.distributed.mesh import Mesh
from titanlab.distributed.traffic import axis_groups
from titanlab.distributed.watchdog import Topology
from titanlab.distributed.world import BESIDE
from titanlab.records import Collective, GroupRecord, Messages

# Number of last collectives in a record of a hang. They must span more than one step of the training.
KEPT = 1000
_DUMP_SECONDS = 2.0
# One dump for each backend's recorder; a build of torch without CUDA has only the first. Private: no public function.
_DUMPS: tuple[Callable[[], bytes] | None, ...] = (
    getattr(c10d, "_dump_fr_trace_json", None),
    getattr(c10d, "_dump_nccl_trace_json", None),
)


def topology(mesh: Mesh, messages: Callable[[], Messages | None] = lambda: None) -> Topology:
    """This rank's groups and coordinates in a mesh."""
    groups = dict(mesh.groups())
    if dist.group.WORLD is not None:
        groups["world"] = dist.group.WORLD
    axes = axis_groups(mesh)
    return Topology(
        groups={
            group.group_name: GroupRecord(
                axes.get(group.group_name, "other"), tuple(dist.get_process_group_ranks(group))
            )
            for group in groups.values()
        },
        coordinates={axis: mesh.coordinate(axis) for axis, degree in mesh.layout.degrees().items() if degree > 1},
        messages=messages,
        collectives=last_collectives,
    )


def last_collectives(kept: int = KEPT) -> list[Collective]:
    """The last collectives that this process has called, oldest first; empty if the recorder is off.

    Leaves out collectives of `World.beside`: another thread calls these, and the training does not wait for them.
    """
    calls: dict[tuple[Any, ...], Collective] = {}
    for dump in _DUMPS:
        for entry in _entries(dump) if dump is not None else []:
            if BESIDE in entry.get("process_group", [])[1:]:
                continue
            is_message = bool(entry.get("is_p2p"))
            call = Collective(
                group=str((entry.get("process_group") or [""])[0]),
                sequence=entry.get("p2p_seq_id" if is_message else "collective_seq_id", 0),
                operation=str(entry.get("profiling_name", "")).rpartition(":")[2],
                sizes=tuple(map(tuple, entry.get("input_sizes", []))),
                dtypes=tuple(entry.get("input_dtypes", [])),
                is_message=is_message,
                # With gloo the state stays `scheduled`, and a complete collective is retired.
                is_done=bool(entry.get("retired")) or entry.get("state") == "completed",
                created=entry.get("time_created_ns", 0) / 1e9,
            )
            # Both dumps may hold the same recorder's collectives.
            calls[call.group, call.is_message, call.sequence, call.created] = call
    return sorted(calls.values(), key=lambda call: call.created)[-kept:]


def _entries(dump: Callable[[], bytes]) -> list[dict[str, Any]]:
    """The entries of a dump; empty if the dump does not end: the thread that hangs may hold the recorder's lock."""
    entries: list[dict[str, Any]] = []

    def read() -> None:
        entries.extend(json.loads(dump()).get("entries", []))

    thread = threading.Thread(target=read, name="flight-recorder", daemon=True)
    thread.start()
    thread.join(_DUMP_SECONDS)
    return list(entries)
