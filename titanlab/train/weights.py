"""Reads weights: titanlab's own weights folder, and Hugging Face's. Only the reading of tensors imports torch.

    weights.json                     the model, its context, the biases of routers, a digest of the content
    weights-00001-of-00003.safetensors …, weights.index.json
    conf/model/NAME.yaml             the model as an option: --config-dir FOLDER/conf model=NAME
    tokenizer/                       if the source has one
    generation_config.json           if the source has one

Biases of routers are not parameters: a checkpoint stores them beside its tensors. A folder of the hub is fetched into
the hub's own cache, in which an interrupted download continues.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError, safe_open

from titanlab.costs import block_name
from titanlab.errors import ConfigError
from titanlab.options import discover, schema_of
from titanlab.system import LFS_POINTER, hub_error, is_absent, parse_json, unreachable
from titanlab.techniques.model.contract import Foreign, HuggingFaceFamily, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor


# Number formats of weights that are not quantised, by their names in safetensors.
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_WHOLE = "fetch the folder again, whole"
_SAME_MODEL = "choose the model that it was trained as"
CHUNK_BYTES = 1 << 26
"""Bytes of a tensor that are read, changed and written at a time."""
Biases = Mapping[str, Sequence[float]]
"""By block (`layers.0`, …), the number that is added to each expert's probability for the choice."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor on disk: its number format, named as in safetensors, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return BYTES[self.dtype] * math.prod(self.shape)

    def chunks(self, *, rows: int = 1) -> Iterator[tuple[list[int], list[int]]]:
        """Cut the tensor into boxes of about CHUNK_BYTES, with a multiple of `rows` rows; yields offsets and sizes."""
        width = self.nbytes // max(self.shape[0], 1)
        step = max(CHUNK_BYTES // max(width * rows, 1), 1) * rows
        for start in range(0, self.shape[0], step):
            size = min(step, self.shape[0] - start)
            yield [start] + [0] * (len(self.shape) - 1), [size, *self.shape[1:]]


@dataclass(frozen=True, kw_only=True)
class WeightsSource:
    """A model's weights, read a box of a tensor at a time.

    Attributes:
        entries: every parameter by titanlab's name, in the model's order.
        biases: biases of the routers; empty: the routers have none.
        about: other values of the folder's config: `max_position_embeddings`, ids of special tokens.
        digest: hash of the content; empty if it is not known.
        copies: tensors that must equal another tensor and are not read: name → the other tensor's name, as in the
            files.
        not_read: a line for each kind of weights in the folder that is not read.
        tokenizer: the folder of the tokenizer's files, which may be missing.
        generation: the path of generation_config.json, or its content.
        title: a name of the weights for users.
    """

    model: ModelConfig
    entries: Mapping[str, TensorEntry]
    biases: Biases = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    not_read: Sequence[str] = ()
    tokenizer: Path = Path()
    generation: Path | Mapping[str, Any] = field(default_factory=dict)
    title: str = ""

    @property
    def context(self) -> int:
        """Largest number of tokens in a sequence."""
        return int(self.about[CONTEXT])

    @property
    def usual_dtype(self) -> str:
        """The number format that most tensors have."""
        kinds = [entry.dtype for entry in self.entries.values()]
        return DTYPES[max(sorted(set(kinds)), key=kinds.count)]

    @abstractmethod
    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A box of one parameter, with rows in titanlab's order, on the CPU, in the dtype of the source."""

    def fill(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy into parameters by their names, in place; of a DTensor only this rank's part is read."""
        from titanlab.dtensor import own_box

        for name, parameter in parameters.items():
            if (box := own_box(parameter)) is None or not box[0].numel():
                continue
            local, offsets = box
            for start, sizes in TensorEntry(dtype=self.entries[name].dtype, shape=tuple(local.shape)).chunks():
                there = [offset + at for offset, at in zip(offsets, start, strict=True)]
                local[start[0] : start[0] + sizes[0]].copy_(self.read(name, there, sizes))


@dataclass(frozen=True, kw_only=True)
class SafetensorsSource(WeightsSource):
    """Weights in safetensors files of titanlab or of another library.

    Attributes:
        places: for each tensor name in `foreign` and `copies`, the file, and the tensor's name in that file.
        foreign: name and order of rows in the files, by titanlab's name.
    """

    places: Mapping[str, tuple[Path, str]]
    foreign: Mapping[str, Foreign]

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        stored = self.foreign[name]
        first, last = offsets[0], offsets[0] + sizes[0]
        if stored.stack:
            import torch

            parts = [self.read_stored(each, offsets[1:], sizes[1:]) for each in stored.stack[first:last]]
            return torch.stack(parts) if parts else torch.empty(*sizes)
        if not stored.head or not math.prod(sizes):
            return self.read_stored(stored.name, offsets, sizes)
        begin, end = first // stored.head * stored.head, -(-last // stored.head) * stored.head
        heads = self.read_stored(stored.name, [begin, *offsets[1:]], [end - begin, *sizes[1:]])
        return in_pairs(heads, stored.head)[first - begin : last - begin]

    def read_stored(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A box of a tensor as the files have it; `name` is a name in `places`."""
        path, stored = self.places[name]
        # The file is closed after each read, because its mapped pages count as this process's memory.
        with safe_open(path, framework="pt") as file:
            box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            return cast("Tensor", file.get_slice(stored)[box])


def in_pairs(rows: Tensor, head: int) -> Tensor:
    """Order the rows of every head as 0, head/2, 1, head/2 + 1, …: [heads · head, …] → the same shape."""
    pairs: Tensor = rows.unflatten(0, (-1, 2, head // 2)).transpose(1, 2).flatten(0, 2)
    return pairs


def in_halves(rows: Tensor, head: int) -> Tensor:
    """The inverse of `in_pairs`."""
    halves: Tensor = rows.unflatten(0, (-1, head // 2, 2)).transpose(1, 2).flatten(0, 2)
    return halves


MANIFEST, INDEX, STEM = "weights.json", "weights.index.json", "weights"
TOKENIZER, GENERATION = "tokenizer", "generation_config.json"
CONTEXT = "max_position_embeddings"
"""The largest number of tokens in a sequence, by its name in config.json."""
SCHEMA = 1


def is_weights_folder(path: Path) -> bool:
    """Whether a path is a weights folder of titanlab's: it has a manifest."""
    return (path / MANIFEST).is_file()


def is_weights(path: Path) -> bool:
    """Whether a folder has weights of titanlab's or of Hugging Face's."""
    return is_weights_folder(path) or is_hf_folder(path)


def open_folder(path: Path, key: str) -> SafetensorsSource | None:
    """Open the weights in a folder; None if it is neither titanlab's nor Hugging Face's."""
    if is_weights_folder(path):
        return open_weights(path, key)
    return open_hf(path, key) if is_hf_folder(path) else None


def open_weights(path: Path, key: str) -> SafetensorsSource:
    """Open the weights in titanlab's own folder; reads only names, shapes and sizes.

    Raises:
        ConfigError: the folder is not complete.
    """
    manifest = read_object(path / MANIFEST, key)
    try:
        model = model_of(manifest["model"])
        about, digest = checked_about(dict(manifest.get("about", {}))), str(manifest["digest"])
        numbers = {name: list(map(float, block)) for name, block in dict(manifest.get("biases", {})).items()}
        if not all(math.isfinite(number) for block in numbers.values() for number in block):
            raise ValueError("a bias is not finite")
        biases = biases_of(model, numbers, key, path)
        if manifest["schema"] != SCHEMA:
            raise ValueError("another version of titanlab wrote it")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        rule = f"its {MANIFEST} cannot be used ({type(error).__name__}: {error})"
        raise ConfigError(key, path, rule, "import the weights again") from error
    entries, places = read_entries(indexed_files(path, INDEX, f"{STEM}.safetensors", key), key)
    expected = model.account().parameters
    check_entries(path, key, expected, entries)
    return SafetensorsSource(
        model=model,
        entries={name: entries[name] for name in expected},
        places={name: (places[name], name) for name in expected},
        foreign={name: Foreign(name=name) for name in expected},
        about=about,
        digest=digest,
        biases=biases,
    )


def checked_about(about: Mapping[str, Any]) -> dict[str, Any]:
    """Check values beside a model's config: `max_position_embeddings` is a whole number of at least 1, or absent.

    Raises:
        ValueError: it has another value; null counts as absent.
    """
    context = about.get(CONTEXT)
    if context is None:
        return {name: value for name, value in about.items() if name != CONTEXT}
    if not isinstance(context, int) or isinstance(context, bool) or context < 1:
        raise ValueError(f"{CONTEXT} is not a whole number of at least 1")
    return dict(about)


def model_of(mapping: Mapping[str, Any]) -> ModelConfig:
    """Make a model's config from plain values.

    Raises:
        KeyError, TypeError: the values are not those of a model.
        ConfigError: no installed package has this kind of model, or a value breaks a rule.
    """
    schema = schema_of("model", mapping["kind"])
    for entry in dataclasses.fields(schema):
        # Check types here, because a config checks only ranges: a recipe's types are checked where users write values.
        if entry.type in (int, "int") and type(value := mapping.get(entry.name, 0)) is not int:
            raise TypeError(f"{entry.name} is not a whole number: {value!r}")
    try:
        model: ModelConfig = schema(**mapping)
    except (ValueError, OverflowError) as error:
        raise TypeError(str(error)) from error
    return model


def biases_of(model: ModelConfig, routing: Biases, key: str, value: object) -> Biases:
    """The routers' biases in `routing`, the saved state of load balancing; empty if the routers have no biases.

    Args:
        model: the config with which the state was saved; the state has biases only if the config's balance is `bias`.
        key, value: where the state is from, for the error.

    Raises:
        ConfigError: the state has another number of blocks or experts than the model.
    """
    account = model.account()
    if account.experts is None or account.experts.balance != "bias" or not routing:
        return {}
    names = [block_name(layer) for layer in range(account.layers)]
    if {*routing} != {*names} or any(len(routing[name]) != account.experts.count for name in names):
        rule = f"its biases are not those of {account.layers} blocks of {account.experts.count} experts"
        raise ConfigError(key, value, rule, _SAME_MODEL)
    return routing


def read_object(path: Path, key: str) -> dict[str, Any]:
    """The object in a JSON file; ConfigError: the file is missing or has no JSON object."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(key, path.parent, f"has no {path.name}", "name a folder that has one") from error
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:80]
        raise ConfigError(key, path, f"cannot be read ({reason})", "fetch the file again") from error
    if not isinstance(value, dict):
        raise ConfigError(key, path, "holds no JSON object", "fetch the file again")
    return value


def indexed_files(path: Path, index: str, single: str, key: str) -> dict[Path, list[str] | None]:
    """The safetensors files of a folder, each with the names of the tensors that the index places in it.

    If there are both a single file and an index, from an earlier save, the single file is used, as in transformers.

    Returns:
        the single file with None for all its tensors, or the files that the index names.

    Raises:
        ConfigError: the index cannot be used, or names a missing file.
    """
    if (path / single).is_file() or not (path / index).is_file():
        return {path / single: None}
    weight_map = read_object(path / index, key).get("weight_map")
    places = dict(weight_map) if isinstance(weight_map, dict) else {}
    if not places or not all(isinstance(name, str) and name == Path(name).name for name in places.values()):
        raise ConfigError(key, path / index, "names no files of this folder", "fetch the file again")
    names = sorted(set(places.values()))
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        rule = f"names {len(names)} files, and {len(missing)} are missing: {missing[0]}"
        raise ConfigError(key, path / index, rule, _WHOLE)
    return {path / name: [tensor for tensor, file in places.items() if file == name] for name in names}


def read_entries(
    files: Mapping[Path, Collection[str] | None], key: str
) -> tuple[dict[str, TensorEntry], dict[str, Path]]:
    """Tensors in safetensors files by name, and the file of each; does not import torch.

    Args:
        files: for each file, the names of the tensors to read; None: all tensors.

    Raises:
        ConfigError: a file is missing, damaged or not a regular file, or lacks a tensor.
    """
    entries: dict[str, TensorEntry] = {}
    places: dict[str, Path] = {}
    for path, wanted in files.items():
        if path.exists() and not path.is_file():
            # Do not open such a file: opening a named pipe would wait for a writer.
            raise ConfigError(key, path, "is not a regular file", "fetch the file again")
        try:
            with safe_open(path, framework="np") as file:
                there = set(file.keys())
                for name in sorted(there) if wanted is None else wanted:
                    if name not in there:
                        raise ConfigError(key, path, f"lacks {name}, which the index places in it", _WHOLE)
                    tensor = file.get_slice(name)
                    entries[name] = TensorEntry(dtype=str(tensor.get_dtype()), shape=tuple(tensor.get_shape()))
                    places[name] = path
        except (SafetensorError, OSError) as error:
            if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(LFS_POINTER):
                rule = "is a pointer of Git LFS, and not the file"
                raise ConfigError(key, path, rule, "run `git lfs pull` in its repository") from error
            reason = "is missing" if not path.exists() else f"cannot be read ({' '.join(str(error).split())[:80]})"
            raise ConfigError(key, path, reason, "fetch the file again") from error
    return entries, places


def check_entries(
    place: Path, key: str, expected: Mapping[str, tuple[int, ...]], entries: Mapping[str, TensorEntry]
) -> None:
    """Check that a folder has exactly the expected tensors, in formats of `DTYPES`.

    Raises:
        ConfigError: a tensor is missing, has another shape, is not expected, or is quantised.
    """
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            rule = f"{name} is kept as {entry.dtype}, which is not a format of plain weights"
            raise ConfigError(key, place, rule, f"give weights in {', '.join(DTYPES.values())}")
    for name in [*expected, *entries]:
        shapes = [entries[name].shape if name in entries else None, expected.get(name)]
        if shapes[0] != shapes[1]:
            actual, wanted = (
                "absent" if shape is None else "×".join(map(str, shape)) or "a single number" for shape in shapes
            )
            rule = f"its config and its tensors disagree: {name} is {actual}, not {wanted}"
            raise ConfigError(key, place, rule, _WHOLE)


HF_CONFIG, HF_INDEX, HF_STEM = "config.json", "model.safetensors.index.json", "model"
# Files that transformers reads beside the weights.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
)
# Patterns of the files to fetch from a model's top folder; the folders below it have other formats.
_WANTED = (HF_CONFIG, GENERATION, "model*.safetensors", HF_INDEX, *TOKENIZER_FILES)
# Keys of config.json that are not part of the model config; import and export do not change them.
ABOUT = (CONTEXT, "bos_token_id", "eos_token_id", "pad_token_id")
# Words that torch.compile, DDP, FSDP and activation checkpointing add to the names of a state_dict.
_WRAPPERS = re.compile(r"\b(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Endings of files with weights in other forms: Mistral's or a variant's safetensors, GGUF, Meta's .pth, PyTorch's .bin.
_OTHER_WEIGHTS = (".safetensors", ".gguf", ".pth", ".bin")
# transformers' prefix of all tensors' names except the output head's; AutoModel saves names without the prefix.
_BASE = "model."
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def is_hf_folder(path: Path) -> bool:
    return (path / HF_CONFIG).is_file()


def open_hf(path: Path, key: str) -> SafetensorsSource:
    """Open the weights in a Hugging Face folder; reads only configs, names and shapes.

    Raises:
        ConfigError: the folder is not complete, or its model is not supported.
    """
    config = read_object(path / HF_CONFIG, key)
    family = family_for(config)
    model = family.from_hf(config)
    try:
        about = checked_about({name: config[name] for name in ABOUT if name in config})
    except ValueError as error:
        rule = "must be a whole number of at least 1"
        raise ConfigError(f"{HF_CONFIG}:{CONTEXT}", config[CONTEXT], rule, "download the model again") from error
    single = path / f"{HF_STEM}.safetensors"
    has_index, not_read = (path / HF_INDEX).is_file(), []
    if not has_index and not single.is_file():
        pickled = next((name for name in _PICKLED if (path / name).is_file()), None)
        if pickled is not None:
            rule = f"keeps its weights in {pickled}, which runs code when it is read"
            cure = "fetch the model's safetensors, or save it again with transformers' save_pretrained"
            raise ConfigError(key, path, rule, cure)
        others = sorted(file.name for file in path.iterdir() if file.suffix in _OTHER_WEIGHTS)
        rule = f"has neither {single.name} nor {HF_INDEX}{f', but {others[0]}' if others else ''}"
        raise ConfigError(key, path, rule, "give the model in the form of transformers" if others else _WHOLE)
    if has_index and single.is_file():
        left = f"{HF_INDEX} and its files are left of another save, and transformers ignores them too"
        not_read.append(f"reading {single}; {left}")
    if adapter := next((path / name for name in _ADAPTER if (path / name).is_file()), None):
        cure = "to apply it, save the model again after peft's merge_and_unload"
        not_read.append(f"warning: {adapter} belongs to an adapter, which is not applied; {cure}")
    found, places = read_entries(indexed_files(path, HF_INDEX, single.name, key), key)
    shapes, foreign = model.account().parameters, family.tensors(model)
    expected = {
        theirs: foreign[name].shape_there(shape) for name, shape in shapes.items() for theirs in foreign[name].names
    }
    stored: dict[str, str] = {}
    for name in found:
        plain = _WRAPPERS.sub("", name)
        if (full := _BASE + plain) in expected or family.derived.fullmatch(full):
            plain = full
        if plain in stored:
            rule = f"holds {plain} twice, as {stored[plain]} and as {name}"
            raise ConfigError(key, path, rule, "save the model again, without wrappers around it")
        stored[plain] = name
    entries = {plain: found[name] for plain, name in stored.items()}
    copies = {name: original for name, original in family.copies(model).items() if name in entries}
    tensors = {name: entry for name, entry in entries.items() if not family.derived.fullmatch(name)}
    absent = expected.keys() - tensors.keys()
    if len(absent) == 1 and not (head := next(iter(absent))).startswith(_BASE):
        rule = f"holds a model without {head}, its output head, which transformers would begin at random"
        raise ConfigError(key, path, rule, "save the whole model, as AutoModelForCausalLM does")
    # A copy must have the shape of its original, because an import compares the two piece by piece.
    check_entries(path, key, {**expected, **{name: expected[copied] for name, copied in copies.items()}}, tensors)
    return SafetensorsSource(
        model=model,
        entries={
            name: TensorEntry(dtype=entries[foreign[name].names[0]].dtype, shape=shape)
            for name, shape in shapes.items()
        },
        places={plain: (places[name], name) for plain, name in stored.items()},
        foreign=foreign,
        about=about,
        copies=copies,
        not_read=not_read,
    )


def family_for(config: Mapping[str, Any]) -> HuggingFaceFamily[Any]:
    """The family that can read the model of a config.json.

    Raises:
        ConfigError: no installed model supports the architecture.
    """
    architectures = config.get("architectures") or []
    architecture = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else architectures
    known: dict[str, HuggingFaceFamily[Any]] = {}
    for option in discover()["model"].values():
        schema: type[ModelConfig] = option.schema
        if (family := schema.hugging_face()) is not None:
            known.update(dict.fromkeys(family.architectures, family))
    if isinstance(architecture, str):
        # AutoModel saves a LlamaForCausalLM without its output head, as LlamaModel.
        whole = f"{architecture.removesuffix('Model')}ForCausalLM"
        architecture = whole if whole in known else architecture
    if not isinstance(architecture, str) or architecture not in known:
        rule = "is not a supported architecture"
        cure = f"supported: {', '.join(sorted(known))}"
        raise ConfigError("config.json:architectures", architecture or None, rule, cure)
    return known[architecture]


def fetch_model(repo: str, *, revision: str | None, token: str | None, key: str, report: Callable[[str], None]) -> Path:
    """Fetch a model of the hub. Returns its folder.

    The config comes first, so that an unsupported model is refused before gigabytes are fetched.

    Args:
        revision: a branch, tag or commit; None: the model's main branch.
        token: access token of the hub, for gated models; None: `HF_TOKEN` or the token that `hf auth login` saved.

    Raises:
        ConfigError: the model cannot be fetched, or is not supported.
    """
    # If the hub is unreachable, look only in the local cache: a model that was fetched before needs no network.
    problem = unreachable(repo, key)
    given: dict[str, Any] = {"repo_id": repo, "revision": revision, "token": token}
    given |= {} if problem is None else {"local_files_only": True}
    hub: Any = importlib.import_module("huggingface_hub")

    def fetched(function: Callable[..., str], **what: Any) -> Path:
        try:
            return Path(function(**what, **given))
        # The library raises its own errors, those of its HTTP library and of the system; they share no base class.
        except Exception as error:
            if problem is not None:
                raise problem from error
            if what.get("filename") == HF_CONFIG and is_absent(error):
                rule = f"has no {HF_CONFIG}, so it holds no model of transformers"
                raise ConfigError(key, repo, rule, "name a model whose files include one") from error
            raise hub_error(error, repo, key) from error

    family_for(read_object(fetched(hub.hf_hub_download, filename=HF_CONFIG), key))
    report(f"fetching {repo}")
    return fetched(hub.snapshot_download, allow_patterns=list(_WANTED))
