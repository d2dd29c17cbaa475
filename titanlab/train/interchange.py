"""Writes the weights folders of `titanlab import` and `titanlab export`, and finds the weights to write.

A folder appears complete or not at all: it is filled as `….part` and then renamed. Tensors are read, changed and
written a piece at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlab.checkpoint import Place, checkpoints_of, find, find_run_or_checkpoint, of_step, read_contents
from titanlab.data import declared_in, tokenizers
from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.recipe import check_unedited, literal, path_override
from titanlab.records import config_text
from titanlab.system import StoreFault, write_json
from titanlab.techniques.model.contract import Foreign, ModelConfig
from titanlab.train import weights
from titanlab.train.starting_weights import model_of_run
from titanlab.train.weights import DTYPES, Biases, SafetensorsSource, TensorEntry, WeightsSource, in_halves, open_folder

if TYPE_CHECKING:
    import torch

Report = Callable[[str], None]
# The default of transformers' LlamaConfig.max_position_embeddings.
_USUAL_CONTEXT = 2048


def from_folder(path: Path, key: str) -> WeightsSource:
    """The model in an imported folder or in a Hugging Face folder.

    Raises:
        ConfigError: the folder is of neither kind, or not complete.
    """
    source = open_folder(path, key)
    if source is None:
        rule = f"has no {weights.HF_CONFIG}" if path.is_dir() else "is not a folder"
        raise ConfigError(key, path, rule, "give a folder of Hugging Face's, or a model of its hub as owner/name")
    return dataclasses.replace(
        source,
        about={weights.CONTEXT: _USUAL_CONTEXT, **source.about},
        tokenizer=path / weights.TOKENIZER if weights.is_weights_folder(path) else path,
        generation=path / weights.GENERATION,
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


def from_run(text: str, runs: str, checkpoint: Place) -> WeightsSource:
    """The model in a checkpoint that `checkpoint_of` has found for the same run.

    Raises:
        ConfigError: there is no such run; or the checkpoint is damaged, or of another model.
    """
    # Imported here, because it imports torch.
    from titanlab.train.dcp import source_of

    run, _ = find_run_or_checkpoint(text, runs)
    check_unedited(run)
    model, seq_len = model_of_run(run.path, "run")
    contents = read_contents(checkpoint, "run")
    contents.check_model(model.account().parameters)
    tokens: dict[str, Any] = {}
    if run.tokenizer.is_dir():
        tokenizer = tokenizers.load(run.tokenizer, "run")
        tokens = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    return dataclasses.replace(
        source_of(contents, model),
        about={weights.CONTEXT: _context(model, seq_len), **tokens},
        tokenizer=run.tokenizer,
        generation={name: token for name, token in tokens.items() if token is not None},
        title=f"{run.path.name}, {checkpoint.name}",
    )


def from_dcp(folder: Path, model: ModelConfig, key: str) -> WeightsSource:
    """The model in a folder of torch.distributed.checkpoint, which has neither a config nor a tokenizer.

    Raises:
        ConfigError: the folder is damaged or would run code, or has another model.
    """
    from titanlab.train.dcp import dcp_source

    return dataclasses.replace(
        dcp_source(folder, model, key),
        about={weights.CONTEXT: _context(model, _USUAL_CONTEXT)},
        tokenizer=folder,
        generation={},
        title=folder.resolve().name,
    )


def _context(model: ModelConfig, seq_len: int) -> int:
    family = model.hugging_face()
    return max(seq_len, family.stretched_context(model) if family is not None else 0)


def write_ours(
    source: WeightsSource, into: Path, *, name: str, dtype: str | None, shard_bytes: int, report: Report
) -> str:
    """Write a weights folder. Returns the command that trains from it.

    Raises:
        ConfigError: the folder cannot be written, or a number is too large for the dtype.
    """
    model = source.model
    biases = {name: list(block) for name, block in source.biases.items()}
    names = {name: Foreign(name=name) for name in source.entries}
    with _filled(source, into, weights.STEM, weights.INDEX, names, dtype, shard_bytes, report) as (part, digest):
        yaml = part / "conf" / "model" / f"{name}.yaml"
        yaml.parent.mkdir(parents=True)
        values = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
        defaults = {field.name: field.default for field in dataclasses.fields(model)}
        changed = {name: value for name, value in values.items() if name != "kind" and value != defaults[name]}
        schema = discover()["model"][model.kind].schema_name
        comment = f"# From {' '.join(source.title.split())}."
        yaml.write_text(f"defaults: [{schema}, _self_]\n{comment}\n{config_text(literal(changed))}", encoding="utf-8")
        tokenizer_files = copy_tokenizer(source.tokenizer, part / weights.TOKENIZER)
        manifest = {
            "schema": weights.SCHEMA,
            "made_from": source.title,
            "model": dataclasses.asdict(model),
            "about": dict(source.about),
            "digest": digest if not biases else sha256(json.dumps([digest, biases]).encode()).hexdigest(),
            **({"biases": biases} if biases else {}),
        }
        write_json(part / weights.MANIFEST, manifest, durable=True)
    command = ["titanlab", "train", "--config-dir", str(into / "conf"), f"model={name}"]
    command.append(path_override("init_from", into))
    if tokenizer_files:
        command.append(path_override("data.tokenizer", into / weights.TOKENIZER))
    return shlex.join(command)


def write_hf(source: WeightsSource, into: Path, *, dtype: str | None, shard_bytes: int, report: Report) -> None:
    """Write a folder that transformers can open.

    Raises:
        ConfigError: transformers has no such model, the folder cannot be written, or a number is too large for the
            dtype.
    """
    family = source.model.hugging_face()
    if family is None:
        rule = f"{source.model.kind} has no form in transformers"
        raise ConfigError("--format", "hf", rule, "try --format titanlab")
    names = family.tensors(source.model)
    with _filled(source, into, weights.HF_STEM, weights.HF_INDEX, names, dtype, shard_bytes, report) as (part, _):
        if copy_tokenizer(source.tokenizer, part):
            reader = tokenizers.load(part, "tokenizer")
            if isinstance(reader, tokenizers.TiktokenTokenizer):
                # Other libraries read every tokenizer.model as SentencePiece, so this one becomes a tokenizer.json.
                reader.save_json(part / "tokenizer.json")
                reader.file.unlink()
            write_tokenizer_config(part, bos_id=reader.bos_id, eos_id=reader.eos_id, context=source.context)
        config = {
            **family.to_hf(source.model, context=source.context),
            **source.about,
            "torch_dtype": dtype or source.usual_dtype,
        }
        # Write config.json last: without it no library reads the folder as a model.
        write_json(part / weights.HF_CONFIG, config, durable=True)
    if line := left_out(source.biases):
        report(f"{line}; --format titanlab keeps them")


@contextlib.contextmanager
def _filled(
    source: WeightsSource,
    into: Path,
    stem: str,
    index: str,
    names: Mapping[str, Foreign],
    dtype: str | None,
    shard_bytes: int,
    report: Report,
) -> Iterator[tuple[Path, str]]:
    """Yield a temporary folder with the weights, and their digest. At the end replace `into`, and report its size."""
    with whole_folder(into) as part:
        if isinstance(source, SafetensorsSource):
            _check_copies(source)
        digest = write_weights(
            source, part, stem=stem, index=index, foreign=names, dtype=dtype, shard_bytes=shard_bytes
        )
        if not isinstance(source.generation, Path):
            write_json(part / weights.GENERATION, source.generation)
        elif source.generation.is_file():
            shutil.copyfile(source.generation, part / weights.GENERATION)
        yield part, digest
    for line in source.not_read:
        report(line)
    files = sorted(into.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files) / 2**20
    parameters = source.model.account().parameter_count
    count = f"{len(files)} file{'s' if len(files) > 1 else ''}"
    report(f"{into}: {parameters:,} parameters in {len(source.entries)} tensors, {size:,.1f} MiB in {count}")


def _check_copies(source: SafetensorsSource) -> None:
    """Check that a tied output head that the files contain equals the embedding; reads both piece by piece."""
    names = {foreign.name: name for name, foreign in source.foreign.items()}
    for copy, original in source.copies.items():
        for offsets, sizes in source.entries[names[original]].chunks():
            first, second = (source.read_stored(name, offsets, sizes) for name in (original, copy))
            if first.shape != second.shape or not bool((first == second).all()):
                rule = f"its embeddings are tied, but {copy} differs from {original}"
                raise ConfigError("source", source.title, rule, "set tie_word_embeddings to what the model was")


def left_out(biases: Biases) -> str:
    """A line that tells users that their copy of the weights lacks the biases; empty if there are no biases."""
    # The largest difference between the biases of two experts of one transformer block.
    widest = max((max(block) - min(block) for block in biases.values()), default=0.0)
    if not widest:
        return ""
    return (
        f"left out: the biases of {len(biases)} routers, for which the format has no place. Without them a token whose "
        f"experts' probabilities differ by less than {widest:.2g} (the widest of a block) may get other experts"
    )


def write_weights(
    source: WeightsSource,
    folder: Path,
    *,
    stem: str,
    index: str,
    foreign: Mapping[str, Foreign],
    dtype: str | None,
    shard_bytes: int,
) -> str:
    """Write all tensors of a source into safetensors files of a bounded size, with an index if there are several.

    The library's `save_file` needs all tensors of a file in memory; here only one piece is. The format: eight bytes
    with the header's length, little-endian; the header, JSON padded with spaces to a multiple of eight; the tensors.

    Args:
        foreign: for each parameter, its name and the order of its rows in the files.
        dtype: number format, such as `bfloat16`; None keeps the format of each tensor.

    Returns:
        SHA-256 over names, shapes, formats and contents of all tensors; the same for any `shard_bytes`.

    Raises:
        ConfigError: a number is too large for the format.
    """
    import torch
    from huggingface_hub import split_state_dict_into_shards_factory

    format_name = next((name for name, torch_name in DTYPES.items() if torch_name == dtype), None)
    entries = {
        theirs: TensorEntry(dtype=format_name or entry.dtype, shape=foreign[name].shape_there(entry.shape))
        for name, entry in source.entries.items()
        for theirs in foreign[name].names
    }
    # For each tensor in the files: titanlab's parameter, and the tensor's index if that parameter stacks tensors.
    ours = {theirs: (name, n) for name in source.entries for n, theirs in enumerate(foreign[name].names)}
    split = split_state_dict_into_shards_factory(
        entries,
        get_storage_size=lambda entry: entry.nbytes,
        filename_pattern=stem + "{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    hashes = []
    for file, names in split.filename_to_tensors.items():
        with (folder / file).open("xb") as out:
            out.write(_header({name: entries[name] for name in names}))
            for name in names:
                parameter, number = ours[name]
                head, is_stack = foreign[parameter].head, bool(foreign[parameter].stack)
                digest = sha256()
                here = TensorEntry(dtype=source.entries[parameter].dtype, shape=entries[name].shape)
                for offsets, sizes in here.chunks(rows=max(head, 1)):
                    if is_stack:
                        piece = source.read(parameter, [number, *offsets], [1, *sizes])[0]
                    else:
                        piece = source.read(parameter, offsets, sizes)
                    piece = _cast(piece, getattr(torch, DTYPES[entries[name].dtype]), parameter)
                    piece = in_halves(piece, head) if head else piece
                    content = piece.contiguous().flatten().view(torch.uint8).numpy().data
                    out.write(content)
                    digest.update(content)
                hashes.append([name, entries[name].dtype, list(entries[name].shape), digest.hexdigest()])
    if split.is_sharded:
        places = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / index).write_text(json.dumps(places, indent=2) + "\n", encoding="utf-8")
    return sha256(json.dumps(sorted(hashes)).encode()).hexdigest()


def _header(entries: Mapping[str, TensorEntry]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, entry in entries.items():
        end = offset + entry.nbytes
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _cast(piece: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    cast = piece.to(dtype)
    if dtype != piece.dtype and str(dtype) == "torch.float16" and bool((cast.isinf() & piece.isfinite()).any()):
        raise ConfigError("--dtype", "float16", f"{name} has numbers beyond its 65,504", "try bfloat16")
    return cast


_SPACE = "\u2581"
# The tokenizer file that Meta released with a model.
_ORIGINAL = "original/tokenizer.model"


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer files of a folder. Returns their names."""
    files = {name: source / name for name in weights.TOKENIZER_FILES if (source / name).is_file()}
    if not files.keys() & {"tokenizer.json", "tokenizer.model"} and (source / _ORIGINAL).is_file():
        files["tokenizer.model"] = source / _ORIGINAL
    if files:
        target.mkdir(exist_ok=True)
    for name, file in files.items():
        # Do not copy permissions: files in the hub's cache are links to read-only files.
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
        # transformers asks the post-processor of tokenizer.json whether to add bos; titanlab reads `add_bos_token`.
        adds_begin = {} if bos_id in (None, eos_id) else {"add_bos_token": True}
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **adds_begin}
    else:
        sentencepiece: Any = importlib.import_module("sentencepiece")
        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        name_of = model.id_to_piece
        config = {
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": bos_id is not None,
            # Some tokenizers put a space before every text.
            "add_prefix_space": model.encode("a", out_type=str)[0].startswith(_SPACE),
            # False makes transformers encode as SentencePiece does.
            "legacy": False,
        }
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": context}
    for role, token in (("bos_token", bos_id), ("eos_token", eos_id)):
        if token is not None:
            config[role] = name_of(token)
    write_json(path, {**config, **declared_in(path)})


def check_target(folder: Path, is_ours: Callable[[Path], bool], *, force: bool) -> None:
    """Check that a folder can be written. A folder with files needs `force`, and must contain weights.

    Raises:
        ConfigError: the folder must not be replaced, or cannot be written.
    """
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() and not force:
        raise ConfigError("--into", folder, "exists", "name another folder, or give --force to replace it")
    if folder.exists() and not is_ours(folder):
        raise ConfigError("--into", folder, "contains something other than weights", "name another folder")
    parent = next(path for path in folder.absolute().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        why = "no permission" if parent.is_dir() else f"{parent} is not a folder"
        raise ConfigError("--into", folder, f"cannot be written ({why})", "name a folder of yours")


def check_apart(source: Path, folder: Path) -> None:
    """Check that the folder to write does not overlap the folder that is read.

    Raises:
        ConfigError: they are the same folder, or one is in the other.
    """
    target, origin = folder.resolve(), source.resolve()
    if target == origin or origin in target.parents or target in origin.parents:
        raise ConfigError("--into", folder, "is the folder that is read, or lies in it", "name another folder")


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which replaces `folder` when the `with` statement ends without an error.

    Raises:
        ConfigError: another process is writing the folder, or it cannot be written.
    """
    folder = folder.absolute()
    part, old = folder.with_name(f"{folder.name}.part"), folder.with_name(f".{folder.name}.old")
    with contextlib.ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            part.mkdir(exist_ok=True)
            lock = os.open(part, os.O_RDONLY)
            stack.callback(os.close, lock)
            # Ignore a file system without locks: no other process can hold a lock there.
            with contextlib.suppress(OSError):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ConfigError("--into", folder, "is being written by another process", "wait for it") from None
            stack.callback(shutil.rmtree, part, ignore_errors=True)
            # An earlier process may have died and left files here.
            for path in part.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            yield part
            for path in part.rglob("*"):
                if path.is_file():
                    with path.open("rb") as file:
                        # Sync before the rename: after a power cut a folder with the final name must be complete.
                        os.fsync(file.fileno())
            shutil.rmtree(old, ignore_errors=True)
            if folder.exists():
                folder.rename(old)
            part.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
        except StoreFault:
            # The remote store with the checkpoint has failed, not the folder that is written.
            raise
        except OSError as error:
            reason = error.strerror or type(error).__name__
            rule = f"cannot be written ({reason})"
            raise ConfigError("--into", folder, rule, "name a folder of yours with room for it") from error
