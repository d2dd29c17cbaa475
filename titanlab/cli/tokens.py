"""`titanlab tokenize FILES FOLDER` writes token shards; `titanlab download-tokenizer REPO` fetches a tokenizer."""

from __future__ import annotations

import shlex
from argparse import Namespace
from pathlib import Path

from titanlab.data import download_tokenizer, write_token_shards
from titanlab.errors import ConfigError
from titanlab.recipe import path_override
from titanlab.system import Console

# The default size of a vocabulary to train.
_PIECES = 32768


def tokenize_verb(args: Namespace) -> int:
    if args.tokenizer is not None and args.vocab_size is not None:
        rule = "applies to a tokenizer that is trained, and --tokenizer names one"
        raise ConfigError("--vocab-size", args.vocab_size, rule, "leave one of them out")
    with Console() as console:
        index = write_token_shards(
            args.files,
            args.folder,
            tokenizer=args.tokenizer,
            vocab_size=_PIECES if args.vocab_size is None else args.vocab_size,
            text_field=args.text_field,
            validation_fraction=args.validation_fraction,
            report=console.note,
        )
        folder = path_override("data.folder", args.folder)
        # The model's default vocabulary may be smaller than the tokenizer's.
        size = f"model.vocab_size={index.vocab_size}"
        console.note(shlex.join(["titanlab", "train", "data=tokens", folder, size]))
    return 0


def download_tokenizer_verb(args: Namespace) -> int:
    with Console() as console:
        path = download_tokenizer(args.repo, args.folder / Path(args.repo).name, args.token, report=console.note)
        console.note(shlex.quote(path_override("data.tokenizer", path)))
    return 0
