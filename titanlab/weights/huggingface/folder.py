"""A Hugging Face folder, read as weights under titanlab's names. Torch-free until tensors are read."""

from __future__ import annotations

import re
from pathlib import Path

from titanlab.errors import ConfigError
from titanlab.weights.folder import CONTEXT, checked_about, indexed_files, read_object
from titanlab.weights.huggingface.families import family_for
from titanlab.weights.source import Entry, SafetensorsSource, check_entries, read_entries

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
# Words that torch.compile, DDP, FSDP and activation checkpointing put into the names of a state_dict.
_WRAPPERS = re.compile(r"\b(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Endings of files that may hold weights in another form: Mistral's, a variant, GGUF, Meta's.
_OTHER_WEIGHTS = (".safetensors", ".gguf", ".pth", ".bin")
# What transformers puts before the names of all tensors but the output head's; AutoModel saves them without it.
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
            name: Entry(dtype=entries[foreign[name].names[0]].dtype, shape=shape) for name, shape in shapes.items()
        },
        files={plain: places[name] for plain, name in stored.items()},
        foreign=foreign,
        about=about,
        copies=copies,
        wrapped=stored,
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
