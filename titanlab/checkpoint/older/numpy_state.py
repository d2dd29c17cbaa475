"""The state of numpy's generator in older checkpoints: a pickled array, read without running its code.

torch.load with weights_only=True would need numpy's arrays and dtypes on its list of safe names, and with them a pickle
can make a dtype that reads any memory.
"""

from __future__ import annotations

import io
import zipfile
from typing import Any

import numpy as np

from titanlab.checkpoint.older.inert_pickle import UnreadablePickle, read_inert

_MOST_BYTES = 1 << 16
_NAMES = frozenset(
    [
        *((module, "_reconstruct") for module in ("numpy.core.multiarray", "numpy._core.multiarray")),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        # Pickles of torch.save have protocol 2, which writes bytes as encode(text, "latin1"). Nothing calls it here.
        ("_codecs", "encode"),
    ]
)


def is_numpy_state(name: str) -> bool:
    """Whether an entry that is not a tensor is the state of numpy's generator, as in older checkpoints."""
    return name.startswith("generators.") and name.endswith(".numpy")


def read_numpy_state(file: io.BytesIO) -> tuple[Any, ...]:
    """Read the state of numpy's generator from the bytes that torch.save wrote into an older checkpoint.

    Raises:
        UnreadablePickle: the bytes are something else.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            (entry,) = (file for file in archive.infolist() if file.filename.endswith("/data.pkl"))
            if max(entry.file_size, entry.compress_size) > _MOST_BYTES:
                raise UnreadablePickle("is too long for the state of a generator")
            kind, array, position, has_gauss, gauss = read_inert(archive.read(entry), _NAMES)
        *_, content = array.state
        text, encoding = content.args
        words = np.frombuffer(text.encode(encoding), "<u4").tolist()
    except (zipfile.BadZipFile, ValueError, TypeError, AttributeError, LookupError) as error:
        raise UnreadablePickle("is no state of numpy's generator") from error
    return kind, words, position, has_gauss, gauss
