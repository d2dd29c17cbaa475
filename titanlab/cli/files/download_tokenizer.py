"""`titanlab download-tokenizer REPO`: fetch a model's tokenizer from the Hugging Face hub."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from titanlab.cli.arguments import Arguments
from titanlab.data.tokenizers.download import download_tokenizer
from titanlab.recipe.literal import path_override
from titanlab.system.files import user_path
from titanlab.system.terminal import Console


def main(arguments: Sequence[str]) -> int:
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
