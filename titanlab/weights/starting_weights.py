"""What `init_from` means: a run that begins with the weights of a folder, and with nothing else of it.

Three kinds of folder will do: one that `titanlab import` or `titanlab export` made, one of Hugging Face's, and a run or
one of its checkpoints. `checkpoint.load_from` is something else: it takes the optimizer's state and the place in the
data too. Until a model is filled, nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titanlab.checkpoint.folders import check_checkpoint, check_shapes, check_step, find
from titanlab.checkpoint.metadata import read_saved
from titanlab.errors import ConfigError
from titanlab.model.contract import ModelConfig
from titanlab.records.config_file import read_config
from titanlab.weights.folder import is_weights_folder, model_of, open_weights
from titanlab.weights.huggingface.folder import CONFIG, is_hf_folder, open_hf
from titanlab.weights.source import SafetensorsSource

if TYPE_CHECKING:
    from torch import nn

    from titanlab.recipe.recipe import Recipe

KEY = "init_from"
# Of a large file whose content nobody has a digest of: this much at so many places tells one training from another.
_SAMPLE_BYTES = 1 << 16
_SAMPLES = 16
_LARGE_BYTES = 1 << 26


def check_beginning(recipe: Recipe) -> None:
    """Hold a new run to what it is to begin with: weights alone, or a checkpoint with all that is in it.

    Raises:
        ConfigError: there is none, or it is another model's.
    """
    check_start(recipe)
    if recipe.checkpoint.load_from is not None:
        checkpoint = find(recipe.checkpoint.load_from, "checkpoint.load_from")
        account = recipe.model.account()
        check_shapes(checkpoint, account.parameters, "checkpoint.load_from")
        check_step(checkpoint, recipe.training.steps)
        read_saved(checkpoint, "checkpoint.load_from")


def check_start(recipe: Recipe) -> None:
    """Hold a recipe's `init_from` against its model; reads configs, names and shapes only.

    Raises:
        ConfigError: there is no such folder, it is not whole, or its model is another one.
    """
    if recipe.init_from is None:
        return
    if recipe.checkpoint.load_from is not None:
        rule = "checkpoint.load_from says already what the run starts with"
        raise ConfigError(KEY, recipe.init_from, rule, "give one of the two")
    path = Path(recipe.init_from).expanduser()
    source = open_folder(path, KEY)
    if source is None:
        checkpoint = _checkpoint(recipe.init_from)
        _check_model(recipe.init_from, _model_of_run(checkpoint), recipe.model)
        check_checkpoint(checkpoint, recipe.model.account().parameters, KEY)
        return
    _check_model(recipe.init_from, source.model, recipe.model)
    if source.copies:
        rule = f"holds {next(iter(source.copies))} although its embeddings are tied"
        cure = f"try `titanlab import {path}`, which compares the two"
        raise ConfigError(KEY, recipe.init_from, rule, cure)


def open_folder(path: Path, key: str) -> SafetensorsSource | None:
    """The weights of an imported folder, or of one of Hugging Face's; None: it is neither."""
    if is_weights_folder(path):
        return open_weights(path, key)
    return open_hf(path, key) if is_hf_folder(path) else None


def start_fingerprint(recipe: Recipe) -> str | None:
    """What the weights are, wherever they lie: part of the run's identity. None: the seed makes them."""
    if recipe.init_from is None:
        return None
    path = Path(recipe.init_from).expanduser()
    source = open_folder(path, KEY)
    if source is not None and source.digest:
        return source.digest
    if source is not None:
        return _sampled([path / CONFIG, *sorted(set(source.files.values()))])
    checkpoint = _checkpoint(recipe.init_from)
    return _sampled(sorted(checkpoint.glob("*.distcp")))


def fill_start(recipe: Recipe, model: nn.Module) -> None:
    """Fill a materialised model, or a rank's part of one, with the weights that `init_from` names.

    All ranks call it together.
    """
    assert recipe.init_from is not None
    source = open_folder(Path(recipe.init_from).expanduser(), KEY)
    if source is not None:
        importlib.import_module("titanlab.weights.fill").fill(model, source)
    else:
        store = importlib.import_module("titanlab.checkpoint.store")
        store.load_model(_checkpoint(recipe.init_from), KEY, model)


def _checkpoint(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.exists():
        owner, slash, name = text.partition("/")
        cure = "give an imported folder, a folder of Hugging Face's, or a run"
        if slash and owner and name and "/" not in name and not owner.startswith((".", "~")):
            cure = f"for a model of the hub: `titanlab import {text}`"
        raise ConfigError(KEY, text, "there is no such folder", cure)
    return find(str(path), KEY)


def _model_of_run(checkpoint: Path) -> ModelConfig | None:
    """The model of the run that a checkpoint lies in; None where the checkpoint was taken out of it."""
    run = checkpoint.parent.parent
    if not (run / "config.yaml").is_file():
        return None
    try:
        return model_of(read_config(run / "config.yaml")["model"])
    except (KeyError, TypeError) as error:
        raise ConfigError(KEY, run, f"its config.yaml has no model ({error})", "restore that file") from error


def _check_model(text: str, there: ModelConfig | None, wanted: ModelConfig) -> None:
    if there is None:
        return
    if type(there) is not type(wanted):
        rule = f"is a model of another kind: {there.kind}, and the recipe's is {wanted.kind}"
        raise ConfigError(KEY, text, rule, "choose the model that it was trained as")
    family = wanted.hugging_face()
    name = family.difference(there, wanted) if family is not None else ""
    if name:
        theirs, ours = (_plain(getattr(model, name)) for model in (there, wanted))
        rule = f"is of another model: {name} is {theirs} there and {ours} here"
        raise ConfigError(KEY, text, rule, f"choose the model that it was trained as: model.{name}={theirs}")


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _sampled(files: Sequence[Path]) -> str:
    """SHA-256 over sizes and contents of files, whatever their folder; of large ones over samples."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}/{size}/".encode())
        with path.open("rb") as file:
            if size <= _LARGE_BYTES:
                digest.update(file.read())
                continue
            for place in range(_SAMPLES):
                file.seek(max(size - _SAMPLE_BYTES, 0) * place // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
