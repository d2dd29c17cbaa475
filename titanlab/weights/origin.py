"""The origin of weights to write: a folder or a run's checkpoint, with its tokenizer and generation config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlab.checkpoint.contents import check_checkpoint
from titanlab.checkpoint.folders import find, of_step
from titanlab.checkpoint.remote.address_schema import Place
from titanlab.checkpoint.remote.run_place import checkpoints_of
from titanlab.checkpoint.search import find_run_or_checkpoint
from titanlab.data.tokenizers import tokenizer as tokenizers
from titanlab.errors import ConfigError
from titanlab.model.contract import ModelConfig
from titanlab.recipe.composition.frozen import check_unedited
from titanlab.weights import folder as ours
from titanlab.weights.huggingface import folder as hf
from titanlab.weights.source import Source
from titanlab.weights.starting_weights import open_folder

# The default of transformers' LlamaConfig.max_position_embeddings.
_USUAL_CONTEXT = 2048


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A model that can be written to another folder.

    Attributes:
        source: its weights.
        about: values for config.json that are not part of the model config.
        tokenizer: the folder of the tokenizer's files; it may have none of them.
        generation: the path of generation_config.json, or its content.
        title: name of the origin, for users.
        copies, not_read: see `SafetensorsSource`.
    """

    source: Source
    about: Mapping[str, Any]
    tokenizer: Path
    generation: Path | Mapping[str, Any]
    title: str
    copies: Mapping[str, str] = field(default_factory=dict)
    not_read: Sequence[str] = ()

    @property
    def context(self) -> int:
        """Largest number of tokens in a sequence."""
        return int(self.about[ours.CONTEXT])


def from_folder(path: Path, key: str) -> Origin:
    """The model in an imported folder or in a Hugging Face folder.

    Raises:
        ConfigError: the folder is of neither kind, or not complete.
    """
    source = open_folder(path, key)
    if source is None:
        rule = f"has no {hf.CONFIG}" if path.is_dir() else "is no folder"
        raise ConfigError(key, path, rule, "give a folder of Hugging Face's, or a model of its hub as owner/name")
    imported = ours.is_weights_folder(path)
    return Origin(
        source=source,
        about={ours.CONTEXT: _USUAL_CONTEXT, **source.about},
        tokenizer=path / ours.TOKENIZER if imported else path,
        generation=path / ours.GENERATION,
        title=path.resolve().name,
        copies=source.copies,
        not_read=source.not_read,
    )


def checkpoint_of(text: str, runs: str, *, step: int | None) -> Place:
    """A run's latest checkpoint, or its checkpoint at `step`; the checkpoint itself if `text` names one.

    Raises:
        ConfigError: there is no such run or checkpoint.
    """
    run, named = find_run_or_checkpoint(text, runs)
    if step is not None:
        return of_step(checkpoints_of(run), step, "--step", step)
    return named or find(str(run.path), "run")


def from_run(text: str, runs: str, *, step: int | None, checkpoint: Place | None = None) -> Origin:
    """The model of a checkpoint of a run; None: of that of `checkpoint_of`.

    Raises:
        ConfigError: there is no such run or checkpoint.
    """
    run, _ = find_run_or_checkpoint(text, runs)
    checkpoint = checkpoint or checkpoint_of(text, runs, step=step)
    check_unedited(run)
    config = run.config()
    try:
        model = ours.model_of(config["model"])
        seq_len = int(config["training"]["seq_len"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError("run", run.path, f"its config.yaml has no model ({error})", "restore that file") from error
    check_checkpoint(checkpoint, model.account().parameters, "run")
    about: dict[str, Any] = {ours.CONTEXT: _context(model, seq_len)}
    generation: dict[str, Any] = {}
    if run.tokenizer.is_dir():
        tokenizer = tokenizers.load(run.tokenizer, "run")
        generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        about |= generation
    # Imported here: it imports torch.
    from titanlab.weights.checkpoint_source import run_source

    return Origin(
        source=run_source(checkpoint, model, "run"),
        about=about,
        tokenizer=run.tokenizer,
        generation={name: token for name, token in generation.items() if token is not None},
        title=f"{run.path.name}, {checkpoint.name}",
    )


def from_dcp(folder: Path, model: ModelConfig, key: str) -> Origin:
    """The model in a folder of torch.distributed.checkpoint, which has neither a config nor a tokenizer.

    Raises:
        ConfigError: the folder is damaged or would run code, or has another model.
    """
    # Imported here: it imports torch.
    from titanlab.weights.checkpoint_source import dcp_source

    return Origin(
        source=dcp_source(folder, model, key),
        about={ours.CONTEXT: _context(model, _USUAL_CONTEXT)},
        tokenizer=folder,
        generation={},
        title=folder.resolve().name,
    )


def _context(model: ModelConfig, seq_len: int) -> int:
    family = model.hugging_face()
    return max(seq_len, family.stretched_context(model) if family is not None else 0)
