"""Writes files as wandb's service writes them, so that tests need not start it."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlab.system.quiet_import import import_quietly

BLOCK = 32768
HEADER = b":W&B" + struct.pack("<HB", 0xBEE1, 0)


def write_run(
    path: Path,
    *,
    id: str = "abcd1111-000001",  # noqa: A002
    name: str = "toy-abcd1111",
    group: str = "layouts",
    config: Mapping[str, Any] | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
    summary: Mapping[str, Any] | None = None,
    exit_code: int | None = 0,
    cores: int | None = 2,
) -> Path:
    """A file with one run; `exit_code=None`: the run was killed."""
    record = import_quietly("wandb.proto.wandb_internal_pb2").Record
    records = [record()]
    records[0].run.run_id, records[0].run.display_name, records[0].run.run_group = id, name, group
    for key, value in {"_wandb": {}, **(config or {})}.items():
        records[0].run.config.update.add(key=key, value_json=json.dumps(value))
    if cores is not None:
        records.append(record())
        records[-1].environment.cpu_count_logical = cores
    for row in rows:
        records.append(record())
        records[-1].history.step.num = row["_step"]
        for key, value in row.items():
            records[-1].history.item.add(nested_key=[key], value_json=json.dumps(value))
    if summary is not None:
        records.append(record())
        for key, value in summary.items():
            records[-1].summary.update.add(key=key, value_json=json.dumps(value))
        records[-1].summary.update.add(nested_key=["_wandb", "runtime"], value_json="1")
    if exit_code is not None:
        records.append(record())
        records[-1].exit.exit_code = exit_code
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(framed([each.SerializeToString() for each in records]))
    return path


def framed(records: Sequence[bytes]) -> bytes:
    """Records in LevelDB's format, after wandb's header."""
    content = bytearray(HEADER)
    for data in records:
        begin, is_first = 0, True
        while True:
            left = BLOCK - len(content) % BLOCK
            if left < 7:
                content += bytes(left)
                left = BLOCK
            piece = data[begin : begin + left - 7]
            begin += len(piece)
            is_last = begin == len(data)
            kind = (1 if is_last else 2) if is_first else (4 if is_last else 3)
            checksum = zlib.crc32(piece, zlib.crc32(bytes([kind])))
            content += struct.pack("<IHB", checksum, len(piece), kind) + piece
            is_first = False
            if is_last:
                break
    return bytes(content)
