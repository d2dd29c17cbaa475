"""Lower bounds of the memory that a recipe needs, checked before it starts.

A recipe that passes may still run out of memory; it then ends as `oom`.
"""

from __future__ import annotations

from titanlab.distributed.host import Host
from titanlab.errors import ConfigError
from titanlab.recipe.recipe import Recipe

# Memory of a process without tensors: an interpreter that has imported torch, less the pages that processes share.
PROCESS_BYTES = 64 * 2**20
_ADDRESSABLE = 2**63  # bytes; sizes are signed 64-bit integers


def check_addressable(recipe: Recipe) -> None:
    """Check that the size of the parameters in bytes fits into 64 bits.

    Raises:
        ConfigError: it does not.
    """
    parameters = recipe.model.account().parameter_count
    if parameters * recipe.precision.formats().master_bytes >= _ADDRESSABLE:
        key, value = _largest_size(recipe.model)
        rule = f"makes a model of {parameters:.1e} parameters, more bytes than there are addresses"
        raise ConfigError(key, value, rule, "give a smaller number")


def check_host_memory(recipe: Recipe, host: Host, *, processes: int) -> None:
    """Check that this host has the memory that training on its CPU needs at least; GPU memory is not checked.

    The bound is the sum of the processes, parameters, gradients, and the residual stream of one microbatch.

    Args:
        recipe: resolved.
        processes: how many processes of the run start on this host.

    Raises:
        ConfigError: the host has less.
    """
    if host.memory_bytes is None or recipe.cluster.accelerator != "cpu":
        return
    layout, local_fraction = recipe.layout, processes / recipe.layout.world
    process_bytes = processes * PROCESS_BYTES
    parameters = recipe.model.account().parameter_count
    # Each copy of the model has every parameter and its gradient once.
    model_bytes = int(2 * recipe.precision.formats().master_bytes * parameters * layout.replicate * local_fraction)
    compute_bytes = recipe.precision.formats().compute_bytes
    tokens = recipe.microbatch * recipe.training.seq_len
    width = recipe.model.account().dim
    token_bytes = int(tokens * layout.data * (8 + width * compute_bytes) * local_fraction)
    has = f"and this machine has {_gib(host.memory_bytes)}"
    elsewhere = "a machine with more memory, such as with launch=slurm"
    if process_bytes > host.memory_bytes:
        rule = f"processes take at least {_gib(process_bytes)}, {has}"
        raise ConfigError("world", processes, rule, f"try world={max(1, host.count)}, or take {elsewhere}")
    if process_bytes + model_bytes > host.memory_bytes:
        rule = f"{parameters:,} parameters and their gradients take at least {_gib(model_bytes)} here, {has}"
        raise ConfigError("model", recipe.model.kind, rule, f"take a smaller model, or {elsewhere}")
    if process_bytes + model_bytes + token_bytes > host.memory_bytes:
        training = recipe.training
        key = "seq_len" if recipe.microbatch < training.seq_len else "global_batch"
        if key == "global_batch" and training.microbatch is not None:
            key = "microbatch"
        rule = f"one microbatch is {tokens:,} tokens, which take at least {_gib(token_bytes)} here, {has}"
        cure = f"give a smaller number, or training.microbatch=1, or take {elsewhere}"
        raise ConfigError(f"training.{key}", getattr(training, key), rule, cure)


def _largest_size(model: object) -> tuple[str, int]:
    """The largest whole number among a model's fields: the likely mistake in a model that is too large."""
    sizes = {name: value for name, value in vars(model).items() if type(value) is int}
    name = max(sizes, key=lambda field: sizes[field], default="kind")
    return f"model.{name}", sizes.get(name, 0)


def _gib(count: int) -> str:
    """Bytes in GiB as text; from a million GiB on in scientific notation."""
    gib = count / 2**30
    return f"{gib:,.1f} GiB" if gib < 1e6 else f"{gib:.1e} GiB"
