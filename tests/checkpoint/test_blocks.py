"""Files in blocks: what was written is read, each block once, and any other byte is found."""

import os

import pytest

from titanlab.checkpoint.blocks import BLOCK, BlockReader, BlockWriter, checksum
from titanlab.checkpoint.storage import DamagedFile, folder_at

SIZE = 9 * BLOCK + 1234
CONTENT = bytes(range(256)) * (SIZE // 256) + bytes(SIZE % 256)


@pytest.fixture
def written(tmp_path):
    with BlockWriter(tmp_path / "file") as file:
        for start in range(0, SIZE, 700_001):
            file.write(CONTENT[start : start + 700_001])
        file.finish()
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert (file.size, len(file.checksums)) == (SIZE, 80)
    assert file.checksums[:8] == checksum(CONTENT[:BLOCK]).to_bytes(8, "little")
    assert file.checksums[-8:] == checksum(CONTENT[9 * BLOCK :]).to_bytes(8, "little")
    return tmp_path / "file", file.checksums


def read(path, checksums, ranges):
    with BlockReader(path, SIZE, checksums) as file:
        for start, stop in ranges:
            target = bytearray(stop - start)
            file.read_into(start, memoryview(target))
            assert target == CONTENT[start:stop]
        return file.blocks_read


@pytest.mark.parametrize(
    ("ranges", "blocks"),
    [
        ([(0, SIZE)], 10),
        ([(0, 0)], 0),
        ([(5, 6)], 1),
        ([(BLOCK - 1, BLOCK + 1)], 2),
        ([(10, 20), (30, 40), (BLOCK - 5, BLOCK)], 1),
        ([(10, 3 * BLOCK + 7), (3 * BLOCK + 7, 3 * BLOCK + 9), (3 * BLOCK + 9, 6 * BLOCK)], 6),
        ([(2 * BLOCK, 3 * BLOCK), (5 * BLOCK, 5 * BLOCK + 1), (9 * BLOCK + 5, SIZE)], 3),
        ([(start, min(start + 333_333, SIZE)) for start in range(0, SIZE, 333_333)], 10),
    ],
)
def test_ranges_in_order_read_each_block_once(written, ranges, blocks):
    assert read(*written, ranges) == blocks


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 4 * BLOCK + 17, SIZE - 1])
def test_another_byte_is_found_where_its_block_is_read_and_nowhere_else(written, at):
    path, checksums = written
    content = bytearray(CONTENT)
    content[at] ^= 1
    path.write_bytes(content)
    block = at // BLOCK
    for start, stop in [(at, at + 1), (0, SIZE), (block * BLOCK, min(block * BLOCK + BLOCK, SIZE))]:
        with pytest.raises(DamagedFile, match=f"^its file file has other bytes than were saved, in its block {block} "):
            read(path, checksums, [(start, stop)])
    with pytest.raises(DamagedFile), BlockReader(path, SIZE, checksums) as file:
        file.verify()
    apart = (block + 2) % 9
    assert read(path, checksums, [(apart * BLOCK, (apart + 1) * BLOCK)]) == 1


def test_blocks_that_have_changed_places_are_found(written):
    path, checksums = written
    path.write_bytes(bytes(BLOCK) + CONTENT[BLOCK:])
    with pytest.raises(DamagedFile, match="in its block 0"):
        read(path, checksums, [(0, 1)])


def test_what_is_no_file_of_that_size_is_not_read(written, tmp_path):
    path, checksums = written
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, rule in [
        ("link", "its file link is a symbolic link"),
        ("pipe", "its pipe is no file"),
        ("folder", "its folder is no file"),
        ("missing", "its file missing is missing"),
    ]:
        with pytest.raises(DamagedFile, match=f"^{rule}$"):
            BlockReader(tmp_path / name, SIZE, checksums)
    with pytest.raises(DamagedFile, match=f"has {SIZE} bytes, and had {SIZE + 1} when it was saved"):
        BlockReader(path, SIZE + 1, checksums)
    with pytest.raises(DamagedFile, match="has more than 100 bytes"):
        folder_at(tmp_path).read("file", 100)
