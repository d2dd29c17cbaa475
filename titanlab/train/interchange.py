"""The folders that `titanlab import` and `titanlab export` write, and the origin of the weights in them."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from titanlab.checkpoint import Place, check_checkpoint, checkpoints_of, find, find_run_or_checkpoint, of_step
from titanlab.data import tokenizers
from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.recipe import check_unedited, literal, path_override
from titanlab.records import config_text
from titanlab.system import write_json
from titanlab.techniques.model.contract import Foreign, ModelConfig
from titanlab.train import hub_folders as hf
from titanlab.train import weights_folder as ours
from titanlab.train.hub_folders import copy_tokenizer, write_tokenizer_config
from titanlab.train.starting_weights import model_of_run, open_folder
from titanlab.train.weights_folder import SafetensorsSource, WeightsSource, chunks, left_out, usual_dtype, whole_folder

Report = Callable[[str], None]


def is_weights(path: Path) -> bool:
    """Whether a folder has weights, so that an import or an export may replace it."""
    return ours.is_weights_folder(path) or hf.is_hf_folder(path)


def write_ours(
    origin: WeightsOrigin, into: Path, *, name: str, dtype: str | None, shard_bytes: int, report: Report
) -> str:
    """Write a weights folder. Returns the command that trains from it.

    Raises:
        ConfigError: the folder cannot be written, or a number is too large for the dtype.
    """
    from titanlab.train.weights_tensors import write_weights

    model = origin.source.model
    biases = {name: list(block) for name, block in origin.source.biases.items()}
    with whole_folder(into) as part:
        _check_copies(origin)
        digest = write_weights(
            origin.source,
            part,
            stem=ours.STEM,
            index=ours.INDEX,
            foreign={name: Foreign(name=name) for name in origin.source.entries},
            dtype=dtype,
            shard_bytes=shard_bytes,
        )
        yaml = part / "conf" / "model" / f"{name}.yaml"
        yaml.parent.mkdir(parents=True)
        values = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
        defaults = {field.name: field.default for field in dataclasses.fields(model)}
        changed = {name: value for name, value in values.items() if name != "kind" and value != defaults[name]}
        schema = discover()["model"][model.kind].schema_name
        comment = f"# From {' '.join(origin.title.split())}."
        yaml.write_text(f"defaults: [{schema}, _self_]\n{comment}\n{config_text(literal(changed))}", encoding="utf-8")
        tokenizer_files = copy_tokenizer(origin.tokenizer, part / ours.TOKENIZER)
        _write_generation(origin, part)
        manifest = {
            "schema": ours.SCHEMA,
            "made_from": origin.title,
            "model": dataclasses.asdict(model),
            "about": dict(origin.about),
            "digest": digest if not biases else sha256(json.dumps([digest, biases]).encode()).hexdigest(),
        }
        if biases:
            manifest["biases"] = biases
        write_json(part / ours.MANIFEST, manifest, durable=True)
    _report_size(origin, into, report)
    command = ["titanlab", "train", "--config-dir", str(into / "conf"), f"model={name}"]
    command.append(path_override("init_from", into))
    if tokenizer_files:
        command.append(path_override("data.tokenizer", into / ours.TOKENIZER))
    return shlex.join(command)


def write_hf(origin: WeightsOrigin, into: Path, *, dtype: str | None, shard_bytes: int, report: Report) -> None:
    """Write a folder that transformers can open.

    Raises:
        ConfigError: transformers has no such model, the folder cannot be written, or a number is too large for the
            dtype.
    """
    source = origin.source
    family = source.model.hugging_face()
    if family is None:
        rule = f"{source.model.kind} has no form in transformers"
        raise ConfigError("--format", "hf", rule, "try --format titanlab")
    from titanlab.train.weights_tensors import write_weights

    with whole_folder(into) as part:
        _check_copies(origin)
        write_weights(
            source,
            part,
            stem=hf.STEM,
            index=hf.INDEX,
            foreign=family.tensors(source.model),
            dtype=dtype,
            shard_bytes=shard_bytes,
        )
        _write_generation(origin, part)
        if copy_tokenizer(origin.tokenizer, part):
            reader = tokenizers.load(part, "tokenizer")
            if isinstance(reader, tokenizers.TiktokenTokenizer):
                # Other libraries read every tokenizer.model as SentencePiece.
                reader.save_json(part / "tokenizer.json")
                reader.file.unlink()
            write_tokenizer_config(part, bos_id=reader.bos_id, eos_id=reader.eos_id, context=origin.context)
        config = {
            **family.to_hf(source.model, context=origin.context),
            **origin.about,
            "torch_dtype": dtype or usual_dtype(source),
        }
        # Written last: without a config.json no library reads the folder as a model.
        write_json(part / hf.CONFIG, config, durable=True)
    _report_size(origin, into, report)
    if line := left_out(source.biases):
        report(f"{line}; --format titanlab keeps them")


def _check_copies(origin: WeightsOrigin) -> None:
    """Check that a tied output head that the files contain equals the embedding; reads both piece by piece."""
    source = origin.source
    if not isinstance(source, SafetensorsSource):
        return
    names = {foreign.name: name for name, foreign in source.foreign.items()}
    for copy, original in source.copies.items():
        for offsets, sizes in chunks(source.entries[names[original]]):
            first, second = (source.read_stored(name, offsets, sizes) for name in (original, copy))
            if first.shape != second.shape or not bool((first == second).all()):
                rule = f"its embeddings are tied, and yet {copy} is not {original}"
                raise ConfigError("source", origin.title, rule, "set tie_word_embeddings to what the model was")


def _write_generation(origin: WeightsOrigin, part: Path) -> None:
    if not isinstance(origin.generation, Path):
        write_json(part / ours.GENERATION, origin.generation)
    elif origin.generation.is_file():
        shutil.copyfile(origin.generation, part / ours.GENERATION)


def _report_size(origin: WeightsOrigin, into: Path, report: Report) -> None:
    entries = origin.source.entries.values()
    files = sorted(into.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    for line in origin.source.not_read:
        report(line)
    parameters = origin.source.model.account().parameter_count
    report(
        f"{into}: {parameters:,} parameters in {len(entries)} tensors, {size / 2**20:,.1f} MiB in {len(files)} "
        f"file{'s' if len(files) > 1 else ''}"
    )


# The default of transformers' LlamaConfig.max_position_embeddings.
_USUAL_CONTEXT = 2048


@dataclass(frozen=True, kw_only=True)
class WeightsOrigin:
    """A model that can be written to another folder.

    Attributes:
        about: values for config.json that are not part of the model config.
        tokenizer: the folder of the tokenizer's files, which may be missing.
        generation: the path of generation_config.json, or its content.
    """

    source: WeightsSource
    about: Mapping[str, Any]
    tokenizer: Path
    generation: Path | Mapping[str, Any]
    title: str

    @property
    def context(self) -> int:
        """Largest number of tokens in a sequence."""
        return int(self.about[ours.CONTEXT])


def from_folder(path: Path, key: str) -> WeightsOrigin:
    """The model in an imported folder or in a Hugging Face folder.

    Raises:
        ConfigError: the folder is of neither kind, or not complete.
    """
    source = open_folder(path, key)
    if source is None:
        rule = f"has no {hf.CONFIG}" if path.is_dir() else "is no folder"
        raise ConfigError(key, path, rule, "give a folder of Hugging Face's, or a model of its hub as owner/name")
    imported = ours.is_weights_folder(path)
    return WeightsOrigin(
        source=source,
        about={ours.CONTEXT: _USUAL_CONTEXT, **source.about},
        tokenizer=path / ours.TOKENIZER if imported else path,
        generation=path / ours.GENERATION,
        title=path.resolve().name,
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


def from_run(text: str, runs: str, *, step: int | None, checkpoint: Place | None = None) -> WeightsOrigin:
    """The model in a run's checkpoint; `checkpoint` None: the one that `checkpoint_of` finds.

    Raises:
        ConfigError: there is no such run or checkpoint.
    """
    run, _ = find_run_or_checkpoint(text, runs)
    checkpoint = checkpoint or checkpoint_of(text, runs, step=step)
    check_unedited(run)
    model, seq_len = model_of_run(run.path, "run")
    check_checkpoint(checkpoint, model.account().parameters, "run")
    about: dict[str, Any] = {ours.CONTEXT: _context(model, seq_len)}
    generation: dict[str, Any] = {}
    if run.tokenizer.is_dir():
        tokenizer = tokenizers.load(run.tokenizer, "run")
        generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        about |= generation
    # Imported here: it imports torch.
    from titanlab.train.weights_tensors import run_source

    return WeightsOrigin(
        source=run_source(checkpoint, model, "run"),
        about=about,
        tokenizer=run.tokenizer,
        generation={name: token for name, token in generation.items() if token is not None},
        title=f"{run.path.name}, {checkpoint.name}",
    )


def from_dcp(folder: Path, model: ModelConfig, key: str) -> WeightsOrigin:
    """The model in a folder of torch.distributed.checkpoint, which has neither a config nor a tokenizer.

    Raises:
        ConfigError: the folder is damaged or would run code, or has another model.
    """
    # Imported here: it imports torch.
    from titanlab.train.weights_tensors import dcp_source

    return WeightsOrigin(
        source=dcp_source(folder, model, key),
        about={ours.CONTEXT: _context(model, _USUAL_CONTEXT)},
        tokenizer=folder,
        generation={},
        title=folder.resolve().name,
    )


def _context(model: ModelConfig, seq_len: int) -> int:
    family = model.hugging_face()
    return max(seq_len, family.stretched_context(model) if family is not None else 0)
