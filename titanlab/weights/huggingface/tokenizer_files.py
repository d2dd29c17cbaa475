"""The tokenizer files of a run or an imported folder, in the form that transformers reads."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

from titanlab.data.tokenizers.tokenizer import declared_in
from titanlab.system.atomic_file import write_json
from titanlab.weights.huggingface.folder import TOKENIZER_FILES

_SPACE = "\u2581"
# The tokenizer file that Meta released with a model.
_ORIGINAL = "original/tokenizer.model"


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer files of a folder. Returns their names."""
    files = {name: source / name for name in TOKENIZER_FILES if (source / name).is_file()}
    if not files.keys() & {"tokenizer.json", "tokenizer.model"} and (source / _ORIGINAL).is_file():
        files["tokenizer.model"] = source / _ORIGINAL
    if files:
        target.mkdir(exist_ok=True)
    for name, file in files.items():
        # Without permissions: files in the hub's cache are links to read-only files.
        shutil.copyfile(file, target / name)
    return list(files)


def write_tokenizer_config(folder: Path, *, bos_id: int | None, eos_id: int | None, context: int) -> None:
    """Write the tokenizer's class and special tokens for transformers.

    Entries of an existing tokenizer_config.json are kept; a damaged one is replaced.
    """
    path = folder / "tokenizer_config.json"
    if (folder / "tokenizer.json").is_file():
        library: Any = importlib.import_module("tokenizers")
        name_of = library.Tokenizer.from_file(str(folder / "tokenizer.json")).id_to_token
        # transformers asks the post-processor of tokenizer.json; titanlab reads this entry, too.
        adds_begin = {} if bos_id in (None, eos_id) else {"add_bos_token": True}
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **adds_begin}
    else:
        sentencepiece: Any = importlib.import_module("sentencepiece")
        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        name_of = model.id_to_piece
        config = {
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": bos_id is not None,
            # Some models put a space before every text.
            "add_prefix_space": model.encode("a", out_type=str)[0].startswith(_SPACE),
            # False makes transformers encode as SentencePiece does.
            "legacy": False,
        }
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": context}
    for role, token in (("bos_token", bos_id), ("eos_token", eos_id)):
        if token is not None:
            config[role] = name_of(token)
    write_json(path, {**config, **declared_in(path)})
