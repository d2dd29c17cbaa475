"""A Hugging Face folder, read as weights under titanlab's names, and the tokenizer files that transformers reads.

Torch-free until tensors are read. A folder of the hub is fetched into the hub's own cache, in which an interrupted
download continues.
"""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from titanlab.data import declared_in
from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.system import hub_error, is_absent, parse_json, unreachable, write_json
from titanlab.techniques.model.contract import HuggingFaceFamily, ModelConfig
from titanlab.train.weights_folder import (
    CONTEXT,
    SafetensorsSource,
    TensorEntry,
    check_entries,
    checked_about,
    indexed_files,
    read_entries,
    read_object,
)

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
STEM = "model"
# Files that transformers reads beside the weights.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
# Keys of config.json that are not part of the model config; import and export do not change them.
ABOUT = (CONTEXT, "bos_token_id", "eos_token_id", "pad_token_id")
# Words that torch.compile, DDP, FSDP and activation checkpointing add to the names of a state_dict.
_WRAPPERS = re.compile(r"\b(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Endings of files that may hold weights in another form: Mistral's, a variant, GGUF, Meta's.
_OTHER_WEIGHTS = (".safetensors", ".gguf", ".pth", ".bin")
# transformers' prefix of all names of tensors but the output head's; AutoModel saves names without it.
_BASE = "model."
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def is_hf_folder(path: Path) -> bool:
    """Whether a path is a Hugging Face folder: it has a config.json."""
    return (path / CONFIG).is_file()


def open_hf(path: Path, key: str) -> SafetensorsSource:
    """Open the weights in a Hugging Face folder; reads only configs, names and shapes.

    Raises:
        ConfigError: the folder is not complete, or its model is not supported.
    """
    config = read_object(path / CONFIG, key)
    family = family_for(config)
    model = family.from_hf(config)
    try:
        about = checked_about({name: config[name] for name in ABOUT if name in config})
    except ValueError as error:
        rule = "must be a whole number of at least 1"
        raise ConfigError(f"{CONFIG}:{CONTEXT}", config[CONTEXT], rule, "restore the file") from error
    if not (path / INDEX).is_file() and not (path / f"{STEM}.safetensors").is_file():
        pickled = next((name for name in _PICKLED if (path / name).is_file()), None)
        if pickled is not None:
            rule = f"keeps its weights in {pickled}, which runs code when it is read"
            cure = "fetch the model's safetensors, or save it again with transformers' save_pretrained"
            raise ConfigError(key, path, rule, cure)
        others = sorted(file.name for file in path.iterdir() if file.suffix in _OTHER_WEIGHTS)
        rule = f"has neither {STEM}.safetensors nor {INDEX}{f', but {others[0]}' if others else ''}"
        cure = "give the model in the form of transformers" if others else "fetch the folder again, whole"
        raise ConfigError(key, path, rule, cure)
    found, places = read_entries(indexed_files(path, INDEX, f"{STEM}.safetensors", key), key)
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
    # A copy has the shape of its original: the two are compared piece by piece.
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
        not_read=_not_read(path),
    )


def _not_read(path: Path) -> list[str]:
    single = path / f"{STEM}.safetensors"
    lines = []
    if single.is_file() and (path / INDEX).is_file():
        lines.append(
            f"reading {single}; {INDEX} and its files are left of another save, and transformers ignores them too"
        )
    if adapter := next((path / name for name in _ADAPTER if (path / name).is_file()), None):
        cure = "to apply it, save the model again after peft's merge_and_unload"
        lines.append(f"warning: {adapter} belongs to an adapter, which is not applied; {cure}")
    return lines


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
        rule = "is no architecture that is computed here"
        cure = f"supported: {', '.join(sorted(known))}"
        raise ConfigError("config.json:architectures", architecture or None, rule, cure)
    return known[architecture]


_SPACE = "\u2581"
# The tokenizer file that Meta released with a model.
_ORIGINAL = "original/tokenizer.model"


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer files of a folder. Returns their names."""
    files = {name: source / name for name in TOKENIZER_FILES if (source / name).is_file()}
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
        # transformers asks the post-processor of tokenizer.json; titanlab reads this entry, too.
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


# The files in a model's top folder; folders below it have other formats.
_WANTED = (CONFIG, "generation_config.json", "model*.safetensors", "model.safetensors.index.json", *TOKENIZER_FILES)


def fetch_model(repo: str, *, revision: str | None, token: str | None, key: str, report: Callable[[str], None]) -> Path:
    """Fetch a model of the hub. Returns its folder.

    The config comes first, so that an unsupported model is refused before gigabytes are fetched.

    Args:
        repo: the model's name, such as `meta-llama/Llama-3.1-8B`.
        revision: a branch, tag or commit; None: the model's main branch.
        token: access token of the hub, for gated models; None: `HF_TOKEN` or the token that `hf auth login` saved.

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
        raise hub_error(error, repo, key) from error
    try:
        content = parse_json(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(key, repo, f"its {CONFIG} is no JSON", "name another revision") from error
    family_for(content if isinstance(content, dict) else {})
    report(f"fetching {repo}")
    try:
        folder = hub.snapshot_download(
            repo_id=repo, revision=revision, token=token, allow_patterns=list(_WANTED), **options
        )
        return Path(folder)
    except Exception as error:
        raise (problem or hub_error(error, repo, key)) from error
