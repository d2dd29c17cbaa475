"""A run as its options see it: what their rules may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.costs.account import ModelAccount
from titanlab.costs.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A resolved recipe as the options of its groups see it.

    A schema with a rule that reaches beyond its own fields has a method `check(setting)`, which raises ConfigError.
    So every option has its own rules, and no group has to know another.

    Attributes:
        model: of the recipe's model.
        layout: degrees.
        seq_len: tokens of a sequence.
        microbatch: sequences of one forward pass.
        accelerator: `cpu` or `cuda`.
        device: the accelerator's name.
        compiled: backend that compiles the blocks; empty: none does.
        sequence_parallel: with tensor > 1, the residual stream is cut too.
        cpu_offload: parameters rest in host memory.
        splits_backward: the schedule of the pipeline computes gradients of weights later than those of inputs.
        rests_in, computes_in: dtype of parameters at rest and where they compute, by torch's name: `bfloat16`.
        kinds: option by group, such as precision → bf16, for groups of alternatives. For messages: a rule about an
            option by its name would not know those of other packages.
    """

    model: ModelAccount
    layout: Layout
    seq_len: int
    microbatch: int
    accelerator: str
    device: str
    compiled: str
    sequence_parallel: bool
    cpu_offload: bool
    splits_backward: bool
    rests_in: str
    computes_in: str
    kinds: dict[str, str]
