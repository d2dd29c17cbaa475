"""`titanlab convert`: turns a torchtitan job config into a command line or recipe; names what has no counterpart."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import tomllib
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from titanlab.cli.compose import compose
from titanlab.errors import ConfigError
from titanlab.options import PLUS
from titanlab.recipe import check_all_but_data, conf_folder, find_key, override_text, resolve
from titanlab.recipe.torchtitan import KEYS, VERSION, WITHOUT_COUNTERPART, current_name, reason_without
from titanlab.records import safe_name
from titanlab.system import Console, read_text, write_text

# torchtitan's families of models → the prefixes of titanlab's options for them.
_FAMILIES = {"llama3": ("llama3_1_",), "llama2": ("llama2_",), "qwen3": ("qwen3_", "qwen3_moe_")}
_SMALL = {"dim": 256, "layers": 8, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn_dim": 3072}
# torchtitan's models whose sizes no option of titanlab has → the nearest option, and the sizes to set.
_SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3 debugmodel": (
        "debug",
        {"dim": 256, "layers": 6, "heads": 16, "kv_heads": 16, "ffn_dim": 768, "rope_theta": 5e5, "rope_factor": 8.0},
    ),
    "qwen3 debugmodel": ("qwen3_debug", {**_SMALL, "tied_embeddings": True}),
    "qwen3 debugmodel_moe": ("qwen3_moe_debug", {**_SMALL, "ffn_dim": 768, "experts": 64, "active_experts": 8}),
    "qwen3 235B-A22B": ("qwen3_moe_235b_a22b", {"rope_theta": 5e6}),
}
# Types of keys whose default is None. Keys with that default that are not listed here are texts.
_TYPES = {
    "lr_scheduler.decay_ratio": float,
    "debug.seed": int,
    "parallelism.module_fqns_per_model_part": list[Annotated[list[str], msgspec.Meta(min_length=1)]],
}
_C4_TEST = "tests/assets/c4_test"
# Possible numbers of streams for C4, the default first. It must be a multiple of the number of data-parallel processes.
_STREAMS = (24, 128, 96, 768)
# GPUs for which the recipe is checked, whatever this host has: the second for mxfp8, else the first.
_DEVICES = ("NVIDIA H100 80GB HBM3", "NVIDIA B200")


@dataclass(kw_only=True)
class Converted:
    """A job config as a recipe; `notes` say what differs or is left out."""

    options: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def overrides(self) -> list[str]:
        return [
            *(f"{group}={option}" for group, option in self.options.items()),
            *(override_text(key, value) for key, value in self.values.items()),
        ]

    def recipe_file(self, comment: str) -> str:
        """The YAML of a recipe, for `+recipe=NAME`."""
        lines = [f"# {' '.join(line.split())}" for line in (comment, *self.notes)]
        tree: dict[str, Any] = {"defaults": [{f"override /{group}": name} for group, name in self.options.items()]}
        for key, value in self.values.items():
            *groups, name = key.split(".")
            inner = tree
            for group in groups:
                inner = inner.setdefault(group, {})
            inner[name] = value
        return "\n".join(["# @package _global_", *lines, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)])


def convert_verb(args: Namespace) -> int:
    path, into = args.file, args.into
    if into is not None and (into.suffix != ".yaml" or into.parent.name != "recipe"):
        rule = "must be NAME.yaml in a folder called recipe, for `--config-dir FOLDER +recipe=NAME`"
        raise ConfigError("--into", into, rule, f"try mine/recipe/{into.stem or 'mine'}.yaml")
    if into is not None and into.exists() and not args.force:
        raise ConfigError("--into", into, "exists", "give another name, or add --force")
    made = convert(read_job_config(path), name=safe_name(path.stem), world=args.world, model=args.model)
    (recipe,) = compose(made.overrides)
    device = _DEVICES[recipe.precision.kind == "mxfp8"]
    check_all_but_data(resolve(recipe, world=None, accelerator="cuda", device=device))
    with Console() as console:
        if into is None:
            console.note(" \\\n  ".join(["titanlab train", *map(shlex.quote, made.overrides)]))
        else:
            into.parent.mkdir(parents=True, exist_ok=True)
            write_text(into, made.recipe_file(path.name))
            folder = str(into.parent.parent)
            console.note(shlex.join(["titanlab", "train", "--config-dir", folder, f"+recipe={into.stem}"]))
        for line in ["", "differs, or is left out:", *made.notes] if made.notes else []:
            console.note(line)
    return 0


def read_job_config(path: Path) -> dict[str, Any]:
    """The values of a job config, by the full names of keys in torchtitan `VERSION`.

    Raises:
        ConfigError: the file cannot be read or is not TOML, torchtitan has no such key, or a value has another type.
    """
    try:
        tree = tomllib.loads(read_text(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError("file", path, f"is not a TOML that can be read ({reason})", "give a job config") from error
    leaves = dict(_leaves(tree, ""))
    # If the config names the user's own code, that code may read other keys.
    extended = leaves.get("job.custom_config_module") or leaves.get("experimental.custom_args_module")
    found = {}
    for written, value in leaves.items():
        name = current_name(written)
        if name is None and not extended:
            near = difflib.get_close_matches(written, [*KEYS, *WITHOUT_COUNTERPART], n=1)
            cure = f"did you mean {near[0]}?" if near else "leave it out"
            raise ConfigError(written, value, f"is not a key of torchtitan {VERSION}", cure)
        key = name or written
        if key in KEYS:
            value = _checked(key, written, value)
        found[key] = value
    if found.pop("float8.enable_float8_linear", False):
        found |= {"model.converters": ["float8"], "quantize.linear.float8.filter_fqns": ["output"]}
    return found


def _checked(key: str, written: str, value: Any) -> Any:
    """The value of a key that the file calls `written`; ConfigError: the value has another type, or is below 1."""
    default = KEYS[key].default
    kind = _TYPES.get(key, list[str] if isinstance(default, list) else str if default is None else type(default))
    is_split = written.endswith(".pipeline_parallel_split_points")
    cure = f"torchtitan's default is {'none' if default is None else default}"
    try:
        value = msgspec.convert(value, list[str] if is_split else kind)
    except msgspec.ValidationError as error:
        rule = str(error).partition(" - at ")[0]
        raise ConfigError(written, value, f"{rule[0].lower()}{rule[1:]}", cure) from error
    # A default of -1 in torchtitan means that the number follows from other values.
    if key.endswith(("_degree", "batch_size")) and value < 1 and value != default:
        raise ConfigError(written, value, "must be at least 1", cure)
    return [["embedding"], *([piece] for piece in value)] if is_split else value


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def convert(theirs: Mapping[str, Any], *, name: str, world: int | None, model: str | None) -> Converted:
    """The recipe of a job config.

    Args:
        theirs: the file's values by key; other keys have torchtitan's defaults.
        world: number of processes; None: the product of the degrees.
        model: titanlab's option in place of the file's model.

    Raises:
        ConfigError: a model or a schedule is unknown, or the world is not given and not known.
    """
    given = {key: known.default for key, known in KEYS.items()} | dict(theirs)
    made = Converted(values={"name": name})
    if description := theirs.get("job.description"):
        made.values["notes"] = description
    reasons: dict[str, list[str]] = {}
    for key, value in theirs.items():
        # torchtitan writes 1 or -1 if a degree or a number is not used. Test True first: in Python it equals 1.
        if key not in KEYS and (value is True or value not in (False, "", [], 1, -1)):
            shown = "true" if value is True else value
            reasons.setdefault(reason_without(key) or "has no counterpart", []).append(f"{key}={shown}")
    made.notes += [f"{', '.join(keys)}: {reason}" for reason, keys in reasons.items()]
    _model(made, given, model)
    ranks = _layout(made, given, world)
    _batch(made, given, ranks)
    _precision(made, given)
    _recomputation(made, given)
    _optimizer(made, given)
    _data(made, given, ranks)
    _records(made, given)
    for key, known in KEYS.items():
        # Copy time limits (comm.) only from the file: torchtitan's defaults are too short for titanlab's start.
        if known.is_copied and given[key] is not None and (key in theirs or not key.startswith("comm.")):
            target = find_key(known.ours)
            value = os.path.normpath(given[key]) if known.ours == "runs" else given[key]
            if target is None or override_text(known.ours, value) != f"{known.ours}={target.default}":
                made.values.setdefault(known.ours, value)
    return made


def _model(made: Converted, given: Mapping[str, Any], option: str | None) -> None:
    family, flavor = given["model.name"], given["model.flavor"]
    size = re.sub(r"_(flex|varlen)(_attn)?$", "", flavor)
    end = re.sub(r"[.-]", "_", size.lower())
    names = [f"{prefix}{end}" for prefix in _FAMILIES.get(family, ())]
    found = next((name for name in names if name in _options("model")), None)
    option, sizes = (option, {}) if option else _SIZES.get(f"{family} {size}", (found, {}))
    if option is None:
        rule, cure = "is a model that titanlab has not", "name one of ours, such as --model llama3_1_8b"
        raise ConfigError("model.flavor", f"{family} {flavor}", rule, cure)
    made.options["model"] = option
    made.values |= {f"model.{name}": value for name, value in sizes.items()}
    if size != flavor:
        made.values["data.document_mask"] = True


def _options(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_folder() / group).glob("*.yaml"))


def _layout(made: Converted, given: Mapping[str, Any], world: int | None) -> int:
    """Set degrees, axes' options and the pipeline's schedule. Returns the number of data-parallel processes."""
    values = made.values
    names = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel")
    replicate, shard, context, tensor = (given[f"parallelism.{name}_degree"] for name in names)
    pipeline = given["parallelism.pipeline_parallel_degree"]
    if shard == -1:
        if world is None:
            rule, cure = "is what the number of processes leaves, which torchrun says there", "add --world 8"
            raise ConfigError("parallelism.data_parallel_shard_degree", -1, rule, cure)
        shard = max(1, world // (replicate * context * tensor * pipeline))
    if world is not None:
        values["world"] = world
    if (policy := given["parallelism.fsdp_reshard_after_forward"]) != "default":
        values["parallelism.reshard_after_forward"] = policy
    if given["parallelism.disable_loss_parallel"]:
        values["parallelism.loss_parallel"] = False
    if context > 1 and given["parallelism.context_parallel_rotate_method"] == "allgather":
        values["parallelism.context_method"] = "all_gather"
    if pipeline > 1:
        key = "parallelism.pipeline_parallel_schedule"
        known = {option.replace("_", ""): option for option in _options("schedule")}
        schedule = known.get(given[key].lower().replace("zbvzerobubble", "zbv"))
        if file := given[f"{key}_csv"]:
            schedule, values["schedule.file"] = "csv", file
        if schedule is None:
            raise ConfigError(key, given[key], "has no counterpart here", f"known: {', '.join(known)}")
        made.options["schedule"] = schedule
        if parts := given["parallelism.module_fqns_per_model_part"]:
            values["parallelism.split"] = [part[0] for part in parts[1:]]
    return int(replicate * shard)


def _batch(made: Converted, given: Mapping[str, Any], ranks: int) -> None:
    local, whole = given["training.local_batch_size"], given["training.global_batch_size"]
    whole = local * ranks if whole < 0 else whole
    made.values["training.global_batch"] = whole
    if "schedule" in made.options:
        made.values["training.microbatch"] = given["parallelism.pipeline_parallel_microbatch_size"]
        if (times := whole // (local * ranks)) > 1:
            what = "a step fills its pipeline once with all microbatches"
            made.notes.append(f"{what}; torchtitan's does so {times} times")
    elif whole != local * ranks:
        made.values["training.microbatch"] = local
    if given["validation.enable"]:
        made.values["training.validate_every"] = given["validation.freq"]
        if (steps := given["validation.steps"]) > 0:
            sequences = steps * given["validation.local_batch_size"] * ranks
            made.values["training.validation_sequences"] = sequences
        else:
            made.notes.append(f"validation.steps={steps}: here a number of sequences, training.validation_sequences=32")


def _precision(made: Converted, given: Mapping[str, Any]) -> None:
    options, values = made.options, made.values
    cast = "bf16" if given["training.mixed_precision_param"] == "bfloat16" else "fp32"
    options["precision"] = "bf16_full" if given["training.dtype"] == "bfloat16" else cast
    for converter in given["model.converters"]:
        section = f"quantize.linear.{converter.rpartition('.')[2]}"
        if "grouped_mm" in converter or f"{section}.filter_fqns" not in KEYS:
            made.notes.append(f"model.converters={converter}: has no counterpart; experts multiply in bf16")
            continue
        float8, skip = section.endswith("float8"), given[f"{section}.filter_fqns"]
        recipe = given[f"{section}.recipe_name"] or "tensorwise"
        options["precision"] = f"float8_{recipe}" if float8 else "mxfp8"
        values["precision.skip"] = [name for name in skip if name != "auto_filter_small_kn"]
        if values["precision.skip"] != skip:
            made.notes.append(f"{section}.filter_fqns=auto_filter_small_kn: name the small layers in precision.skip")
        if not float8 and recipe != KEYS[f"{section}.recipe_name"].default:
            made.notes.append(f"{section}.recipe_name={recipe}: precision=mxfp8 is mxfp8_cublas")
        if float8 and recipe == "tensorwise" and not given[f"{section}.enable_fsdp_float8_all_gather"]:
            values["precision.all_gather"] = False
        if float8 and given[f"{section}.emulate"]:
            values["precision.emulate"] = "true"


def _recomputation(made: Converted, given: Mapping[str, Any]) -> None:
    mode, choice = given["activation_checkpoint.mode"], given["activation_checkpoint.selective_ac_option"]
    made.options["ac"] = mode
    if mode == "memory_budget":
        made.values["ac.budget"] = given["activation_checkpoint.memory_budget"]
    elif mode == "selective" and choice == "op":
        made.options["ac"] = "selective_op"
    elif mode == "selective":
        if not choice.isdigit():
            key = "activation_checkpoint.selective_ac_option"
            raise ConfigError(key, choice, "is neither op nor a number", "try op")
        made.options["ac"] = "selective_layer" if int(choice) else "full"
        if int(choice):
            made.values["ac.every"] = int(choice)
    if given["compile.enable"]:
        parts = given["compile.components"]
        made.options["compile"] = ("block" if "loss" in parts else "block_no_loss") if "model" in parts else "off"
        if parts == ["loss"]:
            made.values["compile.loss"] = True


def _optimizer(made: Converted, given: Mapping[str, Any]) -> None:
    if (name := given["optimizer.name"]) != "AdamW":
        made.notes.append(f"optimizer.name={name}: has no counterpart; optimizer=adamw decays weights")
    betas = [given["optimizer.beta1"], given["optimizer.beta2"]]
    if betas != [0.9, 0.95]:
        made.values["optimizer.betas"] = betas
    schedule = "optimizer.schedule"
    made.values[f"{schedule}.warmup_steps"] = min(given["lr_scheduler.warmup_steps"], given["training.steps"])
    share = given["lr_scheduler.decay_ratio"]
    made.values[f"{schedule}.decay_fraction"] = 1.0 if share is None else share


def _data(made: Converted, given: Mapping[str, Any], ranks: int) -> None:
    options, values = made.options, made.values
    dataset, path = given["training.dataset"], given["training.dataset_path"]
    if dataset == "c4_test":
        options["data"], values["data.files"] = "files", path or _C4_TEST
        file = values["data.files"]
        made.notes.append(f"training.dataset=c4_test: {file} is torchtitan's; data=stdlib needs no file")
    else:
        options["data"] = "c4" if dataset.startswith("c4") else "hf"
        if dataset == "c4_validation":
            values["data.split"] = "validation"
        elif dataset != "c4":
            made.notes.append(f"training.dataset={dataset}: is it text of a dataset that data=hf streams?")
        if path is not None or options["data"] == "hf":
            values["data.path"] = path or dataset
        if _STREAMS[0] % ranks:
            values["data.streams"] = next((count for count in _STREAMS if count % ranks == 0), ranks)
    values["data.tokenizer"] = os.path.normpath(given["model.tokenizer_path"] or given["model.hf_assets_path"])


def _records(made: Converted, given: Mapping[str, Any]) -> None:
    """Set checkpoints, trackers and profilers."""
    options, values = made.options, made.values
    modes = {"disabled": "sync", "async": "async", "async_with_pinned_mem": "async_pinned"}
    saves = given["checkpoint.enable"] and not given["checkpoint.load_only"]
    options["checkpoint"] = modes.get(given["checkpoint.async_mode"], "sync") if saves else "off"
    if saves:
        values["checkpoint.every"] = given["checkpoint.interval"]
        values["checkpoint.keep"] = given["checkpoint.keep_latest_k"]
        if given["checkpoint.last_save_model_only"]:
            values |= {"checkpoint.last": "model", "checkpoint.last_dtype": given["checkpoint.export_dtype"]}
    path, is_hugging_face = given["checkpoint.initial_load_path"], given["checkpoint.initial_load_in_hf"]
    if path is not None or is_hugging_face:
        if not given["checkpoint.enable"]:
            made.notes.append("checkpoint.enable=false: torchtitan reads no initial weights, so init_from is left out")
        elif is_hugging_face:
            values["init_from"] = path or values["data.tokenizer"]
        else:
            convert = f"titanlab import {shlex.quote(path)} --model {options['model']} --into weights/start"
            made.notes.append(f"checkpoint.initial_load_path={path}: {convert}, then add init_from=weights/start")
    trackers = [name for name in ("wandb", "tensorboard") if given[f"metrics.enable_{name}"]]
    if trackers:
        options["tracker"] = PLUS.join(trackers)
    every, active = given["profiling.profile_freq"], given["profiling.profiler_active"]
    kinds = {"trace": "profiling.enable_profiling", "memory": "profiling.enable_memory_snapshot"}
    profilers = [kind for kind, key in kinds.items() if given[key]]
    if profilers:
        options["profiler"] = PLUS.join(profilers)
    for kind in profilers:
        group = f"profiler.{kind}" if len(profilers) > 1 else "profiler"
        values[f"{group}.every"] = every
        if kind == "trace":
            values |= {f"{group}.skip": max(2, every - active), f"{group}.steps": active}
