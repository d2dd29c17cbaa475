"""`init_from`: a run starts with the weights of a folder, and takes nothing else from it.

The folder can be one that `titanlab import` or `titanlab export` made, a Hugging Face folder, a run, or a checkpoint of
a run. `checkpoint.load_from` differs: it also takes the optimizer's state and the position in the data. This module
imports torch only when it fills a model.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from titanlab.checkpoint import (
    Contents,
    Place,
    find,
    has_pickle,
    is_address,
    read_contents,
)
from titanlab.errors import ConfigError
from titanlab.recipe import named_parameters
from titanlab.records import read_config
from titanlab.system import user_path
from titanlab.techniques.model.contract import ModelConfig
from titanlab.train.weights import HF_CONFIG, Biases, SafetensorsSource, WeightsSource, biases_of, model_of, open_folder

if TYPE_CHECKING:
    from torch import nn

    from titanlab.distributed import World
    from titanlab.recipe import Recipe


KEY = "init_from"
EXCLUDE = "init_from_exclude"
# If a folder has no digest, a file above _LARGE_BYTES is hashed at _SAMPLES places only: that tells weights apart.
_SAMPLE_BYTES = 1 << 16
_SAMPLES = 16
_LARGE_BYTES = 1 << 26


def check_beginning(recipe: Recipe) -> None:
    """Check the `init_from` and `checkpoint.load_from` of a new run; reads only configs, names and shapes.

    Raises:
        ConfigError: the folder is missing or not complete, or belongs to another model.
    """
    shapes, load_from, text = recipe.model.account().parameters, recipe.checkpoint.load_from, recipe.init_from
    without = excluded(recipe)
    if load_from is not None:
        if text is not None:
            rule = "checkpoint.load_from says already what the run starts with"
            raise ConfigError(KEY, text, rule, "give one of the two")
        contents = contents_of(find(load_from, "checkpoint.load_from"), "checkpoint.load_from")
        contents.check_model(shapes)
        contents.check_whole()
        contents.check_step(recipe.training.steps)
    if text is None:
        return
    if (source := _folder(text)) is None:
        checkpoint = _checkpoint(text)
        _check_model(text, _model_of(checkpoint), recipe.model, without)
        contents_of(checkpoint, KEY).check_model(shapes, without=without)
        return
    _check_model(text, source.model, recipe.model, without)
    if source.copies:
        rule = f"holds {next(iter(source.copies))} although its embeddings are tied"
        raise ConfigError(KEY, text, rule, f"try `titanlab import {user_path(text)}`, which compares the two")


def excluded(recipe: Recipe) -> frozenset[str]:
    """Names of the parameters that `init_from_exclude` leaves out.

    Raises:
        ConfigError: there is no `init_from`, a pattern names no parameter, or the patterns name all parameters.
    """
    patterns = recipe.init_from_exclude
    if patterns and recipe.init_from is None:
        rule = "leaves weights of init_from out, which is not given"
        raise ConfigError(EXCLUDE, list(patterns), rule, "give init_from, or leave it out")
    return named_parameters(EXCLUDE, patterns, recipe.model.account())


def not_read(recipe: Recipe) -> Sequence[str]:
    """A line for each kind of weights in the folder of `init_from` that the run does not start with."""
    source = None if recipe.init_from is None else _folder(recipe.init_from)
    lines = [] if source is None else list(source.not_read)
    if without := sorted(excluded(recipe)):
        shown = ", ".join(without if len(without) <= 4 else [*without[:3], f"{len(without) - 3} more"])
        lines.append(f"not read from {recipe.init_from}, but made by the seed: {shown}")
    return lines


def _folder(text: str) -> SafetensorsSource | None:
    """The weights in a folder of this host; None if `init_from` names a checkpoint."""
    return None if is_address(text) else open_folder(user_path(text), KEY)


def start_fingerprint(recipe: Recipe) -> str | None:
    """A hash of the starting weights that does not depend on their path; None if they come from the seed.

    The hash is part of the run's identity.
    """
    if recipe.init_from is None:
        return None
    if (source := _folder(recipe.init_from)) is not None:
        files = sorted({file for file, _ in source.places.values()})
        return source.digest or _sampled([user_path(recipe.init_from) / HF_CONFIG, *files])
    checkpoint = _checkpoint(recipe.init_from)
    if has_pickle(checkpoint):
        return _sampled(sorted(path for path in checkpoint.glob("*.distcp") if path.is_file()))
    digest = hashlib.sha256()
    for file in read_contents(checkpoint, KEY).files:
        # Hash the checksums instead of the bytes: reading the weights verifies them. Keep the checksums' form, whole
        # numbers: another form would change the identity of existing runs.
        checksums = ",".join(str(number) for (number,) in struct.iter_unpack("<Q", file.checksums))
        digest.update(f"{file.name}/{file.size}/{checksums};".encode())
    return digest.hexdigest()


def fill_start(recipe: Recipe, model: nn.Module, world: World) -> Biases:
    """Fill a materialised model, or this rank's part of it, with the weights of `init_from`; all ranks call it.

    Returns:
        the routers' biases that belong to the weights; empty if the recipe's routers or the folder have none.
    """
    text, without = recipe.init_from, excluded(recipe)
    assert text is not None

    def kept(biases: Biases) -> Biases:
        """The biases, with zeros for routers whose weights are not read."""
        left = {block for block in biases for name in without if name.startswith(f"{block}.") and "router" in name}
        return {block: [0.0] * len(bias) if block in left else bias for block, bias in biases.items()}

    from titanlab.checkpoint import chosen_by_rank_0, on_all_ranks
    from titanlab.train.dcp import source_of
    from titanlab.train.initialise import fill

    source: WeightsSource | None = _folder(text)
    if source is None:
        checkpoint = chosen_by_rank_0(world, lambda: _checkpoint(text))
        contents = on_all_ranks(world, lambda: contents_of(checkpoint, KEY))
        source = source_of(contents, _model_of(checkpoint) or recipe.model)
    on_all_ranks(world, lambda: fill(model, source, without=without))
    return kept(biases_of(recipe.model, source.biases, KEY, text))


def _checkpoint(text: str) -> Place:
    if is_address(text):
        return find(text, KEY)
    path = user_path(text)
    if not path.exists():
        owner, slash, name = text.partition("/")
        cure = "give an imported folder, a folder of Hugging Face's, or a run"
        if slash and owner and name and "/" not in name and not owner.startswith((".", "~")):
            cure = f"for a model of the hub: `titanlab import {text}`"
        raise ConfigError(KEY, text, "there is no such folder", cure)
    return find(str(path), KEY)


def _model_of(checkpoint: Place) -> ModelConfig | None:
    """The model of the run that contains a checkpoint; None if the checkpoint is outside of a run folder."""
    if not isinstance(checkpoint, Path):
        return None
    run = checkpoint.resolve().parent.parent
    return model_of_run(run, KEY)[0] if (run / "config.yaml").is_file() else None


def model_of_run(run: Path, key: str) -> tuple[ModelConfig, int]:
    """The model of a run, and the length of the sequences that it trains on.

    Raises:
        ConfigError: its config.yaml is damaged.
    """
    config = read_config(run / "config.yaml")
    try:
        return model_of(config["model"]), int(config["training"]["seq_len"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(key, run, f"its config.yaml has no model ({error})", "restore that file") from error


def contents_of(checkpoint: Place, key: str) -> Contents:
    """The contents of a checkpoint of titanlab or of a folder of `export --format dcp`, as `read_contents` reads them.

    Raises:
        DamagedCheckpoint: the checkpoint is damaged, or has a value that no run saves; or another tool made the folder,
        which then has no position in the data.
    """
    if not has_pickle(checkpoint):
        return read_contents(checkpoint, key)
    # Imported here: it imports torch.
    from titanlab.train.dcp import dcp_contents

    return dcp_contents(checkpoint, key)


def _check_model(text: str, saved: ModelConfig | None, expected: ModelConfig, without: frozenset[str]) -> None:
    """Check that the models are equal. Their vocabularies may differ if `without` has all parameters that differ."""
    if saved is None:
        return
    if type(saved) is not type(expected):
        rule = f"is a model of another kind: {saved.kind}, and the recipe's is {expected.kind}"
        raise ConfigError(KEY, text, rule, "choose the model that it was trained as")
    there_shapes, here_shapes = saved.account().parameters, expected.account().parameters
    if without and without.issuperset(name for name in here_shapes if here_shapes[name] != there_shapes.get(name)):
        saved = replace(saved, vocab_size=expected.vocab_size)
    family = expected.hugging_face()
    if family is None or not (name := family.difference(saved, expected)):
        return
    values = [getattr(model, name) for model in (saved, expected)]
    there, here = (str(value).lower() if isinstance(value, bool) else str(value) for value in values)
    rule = f"is of another model: {name} is {there} there and {here} here"
    raise ConfigError(KEY, text, rule, f"choose the model that it was trained as: model.{name}={there}")


def _sampled(files: Sequence[Path]) -> str:
    """SHA-256 over files' names, sizes and contents, without their folder; of large files only samples are read."""
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
