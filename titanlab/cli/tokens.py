"""`titanlab tokenize FILES FOLDER` writes token shards; `titanlab download-tokenizer REPO` fetches a tokenizer."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from titanlab.cli.arguments import Arguments
from titanlab.data.new_tokenizer import download_tokenizer
from titanlab.data.text import write_token_shards
from titanlab.errors import ConfigError
from titanlab.recipe.recipe import path_override
from titanlab.system.files import user_path
from titanlab.system.terminal import Console

# Of a tokenizer that is trained.
_PIECES = 32768


def tokenize_verb(arguments: Sequence[str]) -> int:
    """Tokenise, and print how to train on the result."""
    parser = Arguments("tokenize", "Make memory-mapped token shards of text, JSONL or parquet files.")
    parser.add_argument("files", help="a glob, quoted: 'corpus/**/*.jsonl'")
    parser.add_argument("folder", type=user_path, help="where the shards go")
    parser.add_argument("--tokenizer", help="a SentencePiece .model or a tokenizer.json (default: one is trained)")
    parser.add_argument("--vocab-size", type=int, help=f"of a tokenizer that is trained (default {_PIECES})")
    parser.add_argument("--text-field", default="text", help="of JSONL and parquet (default text)")
    parser.add_argument(
        "--validation-fraction", type=float, default=0.01, help="share of documents held out (default 0.01)"
    )
    args = parser.parse_args(arguments)
    if args.tokenizer is not None and args.vocab_size is not None:
        rule = "is of a tokenizer that is trained, and --tokenizer names one that has its size"
        raise ConfigError("--vocab-size", args.vocab_size, rule, "leave one of them out")
    with Console() as console:
        return _tokenise(args, console)


def _tokenise(args: argparse.Namespace, console: Console) -> int:
    index = write_token_shards(
        args.files,
        args.folder,
        tokenizer=args.tokenizer,
        vocab_size=_PIECES if args.vocab_size is None else args.vocab_size,
        text_field=args.text_field,
        validation_fraction=args.validation_fraction,
        report=console.note,
    )
    # The model's default vocabulary may be smaller than the tokenizer's.
    command = [
        "titanlab",
        "train",
        "data=tokens",
        path_override("data.folder", args.folder),
        f"model.vocab_size={index.vocab_size}",
    ]
    console.note(shlex.join(command))
    return 0


def download_tokenizer_verb(arguments: Sequence[str]) -> int:
    """Fetch the tokenizer and print where it is."""
    parser = Arguments("download-tokenizer", "Fetch a model's tokenizer from the Hugging Face hub.")
    parser.add_argument("repo", help="the model, such as meta-llama/Llama-3.1-8B")
    parser.add_argument("--folder", type=user_path, default=Path("tokenizers"), help="where to (default tokenizers/)")
    parser.add_argument(
        "--token", help="of the hub, for gated models (default: HF_TOKEN, or what `hf auth login` kept)"
    )
    args = parser.parse_args(arguments)
    with Console() as console:
        path = download_tokenizer(args.repo, args.folder / Path(args.repo).name, args.token, report=console.note)
        console.note(shlex.quote(path_override("data.tokenizer", path)))
    return 0
