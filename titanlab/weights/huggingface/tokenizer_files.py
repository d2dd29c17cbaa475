"""The tokenizer of a run or an imported folder as transformers reads it."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

from titanlab.system.atomic_file import write_json
from titanlab.weights.huggingface.folder import TOKENIZER_FILES

_SPACE = "\u2581"
_ORIGINAL = "original/tokenizer.model"


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy what a folder has of a tokenizer's files. Returns their names."""
    found = {name: source / name for name in TOKENIZER_FILES if (source / name).is_file()}
    if not found.keys() & {"tokenizer.json", "tokenizer.model"} and (source / _ORIGINAL).is_file():
        # Of a model as Meta released it.
        found["tokenizer.model"] = source / _ORIGINAL
    if found:
        target.mkdir(exist_ok=True)
    for name, file in found.items():
        # Content only: the files of the hub's cache are links to others that nobody may write.
        shutil.copyfile(file, target / name)
    return list(found)


def write_tokenizer_config(folder: Path, *, bos_id: int | None, eos_id: int | None, context: int) -> None:
    """Say to transformers which class reads the folder's tokenizer, and which tokens begin and end a text.

    What the folder's own tokenizer_config.json says stays.
    """
    path = folder / "tokenizer_config.json"
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if (folder / "tokenizer.json").is_file():
        library: Any = importlib.import_module("tokenizers")
        name_of = library.Tokenizer.from_file(str(folder / "tokenizer.json")).id_to_token
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    else:
        sentencepiece: Any = importlib.import_module("sentencepiece")
        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        name_of = model.id_to_piece
        config = {
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": bos_id is not None,
            # A model may put a space before every text, and one that gives texts back exactly does not.
            "add_prefix_space": model.encode("a", out_type=str)[0].startswith(_SPACE),
            # transformers' name for: as SentencePiece does it.
            "legacy": False,
        }
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": context}
    for role, token in (("bos_token", bos_id), ("eos_token", eos_id)):
        if token is not None:
            config[role] = name_of(token)
    write_json(path, {**config, **known})
