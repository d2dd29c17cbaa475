"""The part of a resolved recipe that the rules of options may read."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.costs.account import ModelAccount
from titanlab.costs.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The facts of a resolved recipe that the options' rules may read.

    A schema whose rule needs more than its own fields has a method `check(setting)`, which raises ConfigError.
    So every option has its own rules, and no group depends on another.

    Attributes:
        model: of the recipe's model.
        layout: degrees.
        seq_len: tokens of a sequence.
        microbatch: sequences of one forward pass.
        accelerator: `cpu` or `cuda`.
        device: the accelerator's name.
        compiled: backend that compiles the blocks; empty: blocks are not compiled.
        sequence_parallel: with tensor > 1, the residual stream is cut too.
        cpu_offload: parameters are kept in host memory.
        splits_backward: the pipeline's schedule computes gradients of weights later than those of inputs.
        rests_in, computes_in: dtype of stored and of computing parameters, by torch's name: `bfloat16`.
        kinds: option by group, such as precision → bf16, for groups of alternatives. Only for messages: a rule that
            compares names would miss options of other packages.
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
