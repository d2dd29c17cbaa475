"""What a recipe needs of memory at the very least: sizes that no machine has, or this one has not.

Lower bounds only: what passes may still not fit, and is then told as `oom`.
"""

from __future__ import annotations

from titanlab.distributed.host import Host
from titanlab.errors import ConfigError
from titanlab.recipe.recipe import Recipe

# Beside tensors: an interpreter that has imported torch, without the pages that all processes share.
PROCESS_BYTES = 64 * 2**20
_ADDRESSABLE = 2**63  # bytes; sizes are signed numbers of 64 bits


def check_addressable(recipe: Recipe) -> None:
    """Hold the model to sizes that can be written down, wherever it is to run.

    Raises:
        ConfigError: its parameters are more bytes than 64 bits count.
    """
    parameters = recipe.model.account().parameter_count
    if parameters * recipe.precision.formats().master_bytes >= _ADDRESSABLE:
        key, value = _largest_size(recipe.model)
        rule = f"makes a model of {parameters:.1e} parameters, more bytes than there are addresses"
        raise ConfigError(key, value, rule, "give a smaller number")


def check_host_memory(recipe: Recipe, host: Host, *, processes: int) -> None:
    """Hold what processes on this host's CPU need at least to what it has.

    Counted are the processes themselves, parameters and gradients, and the residual stream of one microbatch.

    Args:
        recipe: resolved.
        processes: how many of its world start here.

    Raises:
        ConfigError: the host has less. Of a GPU's memory nothing is said.
    """
    if host.memory_bytes is None or recipe.cluster.accelerator != "cpu":
        return
    layout, here = recipe.layout, processes / recipe.layout.world
    of_processes = processes * PROCESS_BYTES
    parameters = recipe.model.account().parameter_count
    # Of a parameter and its gradient there is one in each copy of the model.
    of_model = int(2 * recipe.precision.formats().master_bytes * parameters * layout.replicate * here)
    computes = recipe.precision.formats().compute_bytes
    tokens = recipe.microbatch * recipe.training.seq_len
    width = recipe.model.account().dim
    of_tokens = int(tokens * layout.data * (8 + width * computes) * here)
    has = f"and this machine has {_gib(host.memory_bytes)}"
    elsewhere = "a machine with more memory, such as with launch=slurm"
    if of_processes > host.memory_bytes:
        rule = f"processes take at least {_gib(of_processes)}, {has}"
        raise ConfigError("world", processes, rule, f"try world={max(1, host.count)}, or take {elsewhere}")
    if of_processes + of_model > host.memory_bytes:
        rule = f"{parameters:,} parameters and their gradients take at least {_gib(of_model)} here, {has}"
        raise ConfigError("model", recipe.model.kind, rule, f"take a smaller model, or {elsewhere}")
    if of_processes + of_model + of_tokens > host.memory_bytes:
        training = recipe.training
        key = "seq_len" if recipe.microbatch < training.seq_len else "global_batch"
        if key == "global_batch" and training.microbatch is not None:
            key = "microbatch"
        rule = f"one microbatch is {tokens:,} tokens, which take at least {_gib(of_tokens)} here, {has}"
        cure = f"give a smaller number, or training.microbatch=1, or take {elsewhere}"
        raise ConfigError(f"training.{key}", getattr(training, key), rule, cure)


def _largest_size(model: object) -> tuple[str, int]:
    """The largest whole number among a model's fields: where one is out of all proportion, it is that one."""
    sizes = {name: value for name, value in vars(model).items() if type(value) is int}
    name = max(sizes, key=lambda each: sizes[each], default="kind")
    return f"model.{name}", sizes.get(name, 0)


def _gib(count: int) -> str:
    """Bytes in GiB, of large numbers three digits."""
    gib = count / 2**30
    return f"{gib:,.1f} GiB" if gib < 1e6 else f"{gib:.1e} GiB"
