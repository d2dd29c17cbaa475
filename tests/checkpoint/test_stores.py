import pickle

import pytest

from tests.object_store.emulated_store import EmulatedStore
from tests.object_store.running import FOLDER
from tests.object_store.server import Fault
from titanlab.checkpoint import StorePath, storage
from titanlab.checkpoint.storage import BLOCK, BlockReader, BlockWriter, DamagedFile, folder_at
from titanlab.system import StoreFault, disk_fault, tells_of_disk

PLACE = StorePath(FOLDER)
HERE = folder_at(PLACE)
CONTENT = bytes(range(256)) * (3 * BLOCK // 256) + b"end"


def written(name="file", content=CONTENT):
    with BlockWriter(PLACE / name, len(content)) as file:
        file.write(content)
        file.finish()
    return file


def test_bytes_return_as_they_were_written(server):
    file = written()
    assert server.store.objects["bucket/checkpoints/file"] == CONTENT
    target = bytearray(2 * BLOCK)
    with BlockReader(PLACE / "file", file.size, file.checksums) as reader:
        reader.read_into(BLOCK - 5, memoryview(target))
        reader.verify()
    assert target == CONTENT[BLOCK - 5 : 3 * BLOCK - 5]


def test_a_file_that_is_not_finished_is_not_there(server):
    with pytest.raises(KeyError), BlockWriter(PLACE / "file", 100) as file:
        file.write(b"some")
        raise KeyError
    del file
    assert server.store.objects == {}


@pytest.mark.parametrize("kind", ["503", "cut", "short"])
def test_requests_that_fail_twice_are_made_again(server, kind):
    file = written()
    server.store.faults = [Fault("GET", "file", kind, 2), Fault("HEAD", "file", "503", 2)]
    with BlockReader(PLACE / "file", file.size, file.checksums) as reader:
        reader.verify()
    assert [fault.count for fault in server.store.faults] == [0, 0]


def test_a_store_that_stays_down_is_one_line(server):
    file = written()
    server.store.faults = [Fault("GET", "file", "503", -1)]
    with pytest.raises(StoreFault) as caught, BlockReader(PLACE / "file", file.size, file.checksums) as reader:
        reader.verify()
    line = disk_fault(caught.value)
    assert line is not None
    assert tells_of_disk(line)
    assert "\n" not in line
    assert line.startswith(f"the store cannot be used ({FOLDER}/file: StoreError: 503 ")
    assert "check its address, your access and the network, then go on with titanlab resume" in line
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_refusal_is_not_tried_again(server):
    server.store.faults = [Fault("PUT", "file", "403", -1)]
    with pytest.raises(StoreFault, match="PermissionError: access denied"):
        HERE.put("file", b"x")
    assert server.store.faults[0].count == -2


def test_a_store_that_keeps_other_bytes_is_noticed(server):
    server.store.faults = [Fault("PUT", "small", "short", -1)]
    with pytest.raises(StoreFault, match="it has kept other bytes than were written"):
        HERE.put("small", b"twelve bytes")


def test_a_server_that_is_gone_is_one_line(server):
    server.shutdown()
    server.server_close()
    with pytest.raises(StoreFault, match="ConnectionRefusedError"):
        HERE.steps()


def test_other_bytes_and_missing_objects_are_damage(server):
    file = written()
    store = server.store.objects
    store["bucket/checkpoints/file"] = CONTENT[:-1] + b"?"
    with pytest.raises(DamagedFile, match="other bytes than were saved, in its block 3"):
        with BlockReader(PLACE / "file", file.size, file.checksums) as reader:
            reader.verify()
    store["bucket/checkpoints/file"] = CONTENT[:-1]
    with pytest.raises(DamagedFile, match="bytes, and had"):
        BlockReader(PLACE / "file", file.size, file.checksums)
    del store["bucket/checkpoints/file"]
    with pytest.raises(DamagedFile, match="its file file is missing"):
        BlockReader(PLACE / "file", file.size, file.checksums)


def test_a_folder_is_listed_without_those_whose_names_only_begin_like_it(server):
    for name in ("a/x", "a/b/y", "ab/z"):
        HERE.put(name, b"12")
    assert set(folder_at(PLACE / "a").objects()) == {"x", "b/y"}
    assert folder_at(PLACE / "a").sizes(["x", "z"]) == {"x": 2}
    assert folder_at(PLACE / "none").objects() == {}


@pytest.mark.parametrize("dies_at", range(1, 9))
def test_one_of_two_folders_is_whole_whenever_a_move_ends(server, monkeypatch, dies_at):
    whole = {"one": b"1", "index.json": b"i", "two": b"2"}
    for name, content in whole.items():
        folder_at(PLACE / "from").put(name, content)
    count = 0
    real = storage.tried

    def tried(path, action):
        nonlocal count
        count += 1
        if count == dies_at:
            raise InterruptedError
        return real(path, action)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "tried", tried)
        with pytest.raises(InterruptedError):
            folder_at(PLACE / "from").rename(PLACE / "to")
    states = [
        (folder.is_checkpoint(), set(folder.objects()) == set(whole))
        for folder in map(folder_at, (PLACE / "from", PLACE / "to"))
    ]
    assert (True, True) in states
    assert (True, False) not in states


def test_an_object_that_goes_while_it_is_read_is_damage(server):
    file = written()
    with BlockReader(PLACE / "file", file.size, file.checksums) as reader:
        server.store.objects.clear()
        with pytest.raises(DamagedFile, match="^its file file is missing$"):
            reader.verify()


def test_an_error_that_a_store_returns_in_place_of_bytes_is_raised(server, monkeypatch):
    """As async file systems of fsspec did, whatever `on_error` said (its pull request 2045)."""
    HERE.put("index.json", b"{}")

    def returned(store, paths, starts, ends, **options):
        return [FileNotFoundError(path) for path in paths]

    monkeypatch.setattr(EmulatedStore, "cat_ranges", returned)
    with pytest.raises(DamagedFile, match=r"^its file index\.json is missing$"):
        HERE.read("index.json", 100)


@pytest.mark.parametrize(
    ("size", "part"),
    [(0, 64 << 20), (9_000 * (64 << 20), 64 << 20), (9_000 * (64 << 20) + 1, (64 << 20) + 1), (10**13, 1111111112)],
)
def test_a_large_object_has_larger_parts_for_a_store_takes_ten_thousand(monkeypatch, size, part):
    class Noting:
        def open(self, *given, **more):
            raise RuntimeError(f"{given} {more}")

    monkeypatch.setattr(storage, "filesystem", lambda path: (Noting(), "x"))
    with pytest.raises(StoreFault) as caught:
        BlockWriter(PLACE / "a", size)
    assert f"{PLACE}/a: RuntimeError: ('x', 'wb') {{'block_size': {part}}}" in str(caught.value)
