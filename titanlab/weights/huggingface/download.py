"""Fetching a model from the Hugging Face hub into the hub's own cache, in which an interrupted download continues."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.system.hub import explained, is_absent, unreachable
from titanlab.weights.huggingface.families import family_for
from titanlab.weights.huggingface.folder import CONFIG, TOKENIZER_FILES

# The files in a model's top folder; folders below it have other formats.
_WANTED = (CONFIG, "generation_config.json", "model*.safetensors", "model.safetensors.index.json", *TOKENIZER_FILES)


def fetch_model(repo: str, *, revision: str | None, token: str | None, key: str, report: Callable[[str], None]) -> Path:
    """Fetch a model of the hub. Returns its folder.

    The config comes first, so that an unsupported model is refused before gigabytes are fetched.

    Args:
        repo: the model's name, such as `meta-llama/Llama-3.1-8B`.
        revision: a branch, tag or commit; None: the model's main branch.
        token: access token of the hub, for gated models; None: `HF_TOKEN` or the token that `hf auth login` saved.
        key: for errors.
        report: called with a line of progress now and then.

    Raises:
        ConfigError: the model cannot be fetched, or is not supported.
    """
    # A model that was fetched before needs no network.
    problem = unreachable(repo, key)
    options = {} if problem is None else {"local_files_only": True}
    hub: Any = importlib.import_module("huggingface_hub")
    try:
        config = Path(hub.hf_hub_download(repo_id=repo, filename=CONFIG, revision=revision, token=token, **options))
    # The library raises its own errors, those of its HTTP library and of the system; they share no base class.
    except Exception as error:
        if problem is not None:
            raise problem from error
        if is_absent(error):
            rule = f"has no {CONFIG}, so it holds no model of transformers"
            raise ConfigError(key, repo, rule, "name a model whose files include one") from error
        raise explained(error, repo, key) from error
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(key, repo, f"its {CONFIG} is no JSON", "name another revision") from error
    family_for(content if isinstance(content, dict) else {})
    report(f"fetching {repo}")
    try:
        folder = hub.snapshot_download(
            repo_id=repo, revision=revision, token=token, allow_patterns=list(_WANTED), **options
        )
        return Path(folder)
    except Exception as error:
        raise (problem or explained(error, repo, key)) from error
