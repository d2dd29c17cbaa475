"""What position.json and index.json of a checkpoint may hold; msgspec checks types and ranges while it parses.

The files may come from a stranger. Imported by the functions that read them: msgspec takes time to import.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from titanlab.checkpoint.blocks import DamagedFile, one_line

T = TypeVar("T")
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
# Fits torch's numbers. JSON's 1e400 is infinite.
_Number = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | Annotated[float, Meta(gt=-(2.0**63), lt=2.0**63)]
# Prevents overflow of 64 bits in the arithmetic of offsets.
_Size = Annotated[int, Meta(ge=0, lt=1 << 62)]
# The file is opened later: it must be inside of the checkpoint's folder.
_ShardName = Annotated[str, Meta(pattern=r"^rank-[0-9]{5,9}\.safetensors\Z")]
_FileName = Annotated[str, Meta(pattern=r"^(?!\.{1,2}$)[^/\x00]+\Z")]
_StateName = Annotated[str, Meta(pattern=r"^(cpu|python|numpy|cuda)\Z")]
_Rank = Annotated[int, Meta(ge=0, lt=10**9)]
# The largest state of a generator, as JSON, takes 8 KiB.
_State = Annotated[bytes, Meta(max_length=1 << 16)]


class PositionFile(Struct, forbid_unknown_fields=True):
    """position.json; the attributes of `position.Position` and `position.SavedPosition`."""

    step: _Count
    parameters: dict[str, list[_Count]]
    tokens: _Count = 0
    data: dict[str, Any] = {}  # the stream that resumes checks the rest
    tracker: str | None = None
    layout: dict[str, _Count] = {}
    loss_scale: dict[str, _Number] = {}
    routing: dict[str, list[_Number]] = {}
    files: dict[_FileName, _Count] = {}
    generators: dict[_Rank, dict[_StateName, _State]] = {}
    recipe: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")] | None = None
    contents: Literal["model"] | None = None


class PositionSum(Struct, forbid_unknown_fields=True, kw_only=True):
    """Size and checksum of position.json."""

    size: _Size = msgspec.field(name="bytes")
    checksum: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]


class FileEntry(Struct, forbid_unknown_fields=True, kw_only=True):
    """A file of tensors."""

    name: _ShardName
    size: _Size = msgspec.field(name="bytes")
    checksums: bytes


class IndexEntry(Struct, forbid_unknown_fields=True):
    """A tensor."""

    dtype: str
    shape: Annotated[list[_Size], Meta(max_length=32)]
    chunks: list[list[_Size]]


class IndexFile(Struct, forbid_unknown_fields=True):
    """index.json."""

    checksum: str
    format: int
    position: PositionSum
    objects: dict[str, Any]
    tensors: dict[str, IndexEntry]
    files: list[FileEntry]


class FormatOnly(Struct):
    """index.json of any version."""

    format: int


def parsed(content: bytes, kind: type[T], name: str) -> T:
    """The content of a file of a checkpoint.

    Raises:
        DamagedFile: it is not JSON, or a value has another type than it must have.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        rule, _, place = str(error).partition(" - at ")
        where = re.sub(r"^`(key` in `)?\$\.?|`$", "", place)
        text = f"has {where}: {rule}" if where else f"does not fit ({rule})"
        raise DamagedFile(f"its {name} {one_line(text)}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedFile(f"its file {name} is no JSON ({one_line(error)})") from error
