"""`titanlab download-tokenizer`: fetches a tokenizer from the Hugging Face hub."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titanlab.data.tokenizers import tokenizer as tokenizers
from titanlab.errors import ConfigError
from titanlab.system.hub import check_reachable, explained, is_absent

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model")
_NEEDED = ("tokenizer.json", "tokenizer.model")


def download_tokenizer(
    repo: str, folder: Path, token: str | None = None, *, report: Callable[[str], None] = lambda line: None
) -> Path:
    """Fetch the tokenizer of a model on the hub into a folder.

    Args:
        repo: the model's name, such as `meta-llama/Llama-3.1-8B`.
        folder: made if it does not exist; files of the same names are replaced after all files have been fetched.
        token: access token of the hub, for gated models; None: `HF_TOKEN` or the token that `hf auth login` saved.
        report: called with a line for each file.

    Returns:
        The tokenizer's file, for `data.tokenizer`.

    Raises:
        ConfigError: the hub cannot be reached, has no such model or tokenizer, or refuses the token.
    """
    if repo.count("/") > 1 or not repo.strip("/ "):
        raise ConfigError("repo", repo, "is no model of the hub", "give <owner>/<model>, as in its address")
    check_reachable(repo)
    with tempfile.TemporaryDirectory(prefix="titanlab-tokenizer-") as temporary:
        fetched = [name for name in _FILES if _fetch(repo, name, Path(temporary), token, report)]
        if not set(fetched) & set(_NEEDED) and _fetch(repo, tokenizers.ORIGINAL, Path(temporary), token, report):
            Path(temporary, tokenizers.ORIGINAL).rename(Path(temporary, "tokenizer.model"))
            fetched.append("tokenizer.model")
        if not set(fetched) & set(_NEEDED):
            raise ConfigError(
                "repo", repo, f"has neither {' nor '.join(_NEEDED)}", "name a model whose files include one of them"
            )
        # Before any file is replaced, one of the fetched files must load as a tokenizer.
        name = _first_readable(Path(temporary), fetched)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file in fetched:
                _replace(Path(temporary, file), folder / file)
        except OSError as error:
            raise ConfigError(
                "--folder", folder, f"cannot be written ({error.strerror})", "name a folder you can write to"
            ) from error
    tokenizer = tokenizers.load(folder / name, "folder")
    report(f"{folder / name}: {tokenizer.vocab_size:,} tokens")
    return folder / name


def _fetch(repo: str, name: str, folder: Path, token: str | None, report: Callable[[str], None]) -> bool:
    """Fetch one file; False if the model has no file of this name."""
    hub: Any = importlib.import_module("huggingface_hub")
    try:
        hub.hf_hub_download(repo_id=repo, filename=name, local_dir=str(folder), token=token)
    # The library raises its own errors, those of its HTTP library and of the system; they share no base class.
    except Exception as error:
        if is_absent(error):
            return False
        raise explained(error, repo) from error
    report(f"fetched {name}")
    return True


def _first_readable(folder: Path, fetched: list[str]) -> str:
    problem: ConfigError | None = None
    for name in _NEEDED:
        if name in fetched:
            try:
                tokenizers.load(folder / name, "repo")
                return name
            except ConfigError as error:
                problem = problem or error
    assert problem is not None
    raise ConfigError("repo", Path(str(problem.value)).name, problem.rule, problem.cure)


def _replace(source: Path, target: Path) -> None:
    beside = target.with_name(f".{target.name}.new")
    shutil.copyfile(source, beside)
    os.replace(beside, target)
