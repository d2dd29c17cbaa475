"""States of numpy's generator in older checkpoints: read as data, and everything else is refused."""

from __future__ import annotations

import io
import os
import zipfile

import numpy as np
import pytest
import torch

from titanlab.checkpoint.older.inert_pickle import UnreadablePickle
from titanlab.checkpoint.older.numpy_state import is_numpy_state, read_numpy_state


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return io.BytesIO(file.getvalue())


def zipped(**entries):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in entries.items():
            archive.writestr(f"{name}/data.pkl", content)
    return io.BytesIO(file.getvalue())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("generators.0.numpy", True),
        ("generators.17.numpy", True),
        ("generators.0.python", False),
        ("model.generators.0.numpy", False),
        ("generators.0.numpy.more", False),
        ("", False),
    ],
)
def test_its_entry_has_a_name_of_its_own(name, expected):
    assert is_numpy_state(name) is expected


@pytest.mark.parametrize("seed", [0, 5])
def test_a_generator_goes_on_from_it(seed):
    generator = np.random.RandomState(seed)
    generator.standard_normal()
    state = generator.get_state()
    found = read_numpy_state(saved(state))
    assert found == (state[0], state[1].tolist(), *state[2:])
    other = np.random.RandomState(99)
    other.set_state(found)
    assert other.random_sample(3).tolist() == generator.random_sample(3).tolist()


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_name_that_no_state_needs_is_refused(tmp_path):
    for value in (Payload(tmp_path / "ran"), ("MT19937", Payload(tmp_path / "ran"), 0, 0, 0.0)):
        with pytest.raises(UnreadablePickle) as caught:
            read_numpy_state(saved(value))
        said = f"{caught.value} {caught.value.__cause__}"
        assert "asks for posix.mkdir, which could run code" in said
    assert list(tmp_path.iterdir()) == []


BAD = {
    "no archive": lambda: io.BytesIO(b"nothing"),
    "an empty one": lambda: zipped(),
    "two pickles": lambda: zipped(a=b"N.", b=b"N."),
    "damage": lambda: zipped(a=b"hello"),
    "None": lambda: saved(None),
    "too few values": lambda: saved(("MT19937", np.zeros(3, np.uint32))),
    "words of a list": lambda: saved(("MT19937", [1, 2], 0, 0, 0.0)),
    "no words": lambda: saved(("MT19937", None, 0, 0, 0.0)),
    "five letters": lambda: saved("abcde"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_state_is_refused(name):
    with pytest.raises(UnreadablePickle, match=r"^is (no state of numpy's generator|damaged)"):
        read_numpy_state(BAD[name]())


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_pickle_that_is_too_long_is_not_read(method):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("x/data.pkl", b"N" * ((1 << 16) + 1))
    with pytest.raises(UnreadablePickle) as caught:
        read_numpy_state(io.BytesIO(file.getvalue()))
    assert "is too long for the state of a generator" in f"{caught.value} {caught.value.__cause__}"
