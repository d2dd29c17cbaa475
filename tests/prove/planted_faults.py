"""Faults of training that change little of a loss: planted in the ranks of a run, and found by its proof.

Each is a context in which a recipe is trained; one process is trained without them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch

from titanlab.distributed import ALONE, joined
from titanlab.parallelism import pipeline
from titanlab.prove import parity
from titanlab.techniques.model import llama
from titanlab.techniques.precision.cast import LossScale
from titanlab.techniques.precision.cast_schema import Bf16
from titanlab.techniques.precision.float8 import Float8Layers
from titanlab.techniques.precision.float8_schema import Float8Tensorwise
from titanlab.train import Reduction, assemble


def traced(made, run, fault: str):
    """Train as a rank of the pool; one process has no fault."""
    planted = FAULTS[fault](made) if fault and made.layout.world > 1 else contextlib.nullcontext()
    if fault == "not divided" and made.training.microbatch is not None:
        planted = FAULTS[fault](made)
    with planted:
        return parity.trace(made, run, joined(os.environ) or ALONE)


def not_divided(made):
    """The mean over each microbatch instead of the mean over the step."""
    right = LossScale.multiplier
    return patch.object(LossScale, "multiplier", lambda self, constant: right(self, constant) * made.microbatches)


def norms_not_summed(made):
    """Tensor-parallel ranks keep the gradients of norm weights of their own tokens."""
    return patch.object(assemble.Stage, "finish_gradients", lambda self: None)


def values_permuted(made):
    """The value heads of a process are in another order than its keys."""

    def forward(self, hidden, rope, documents=None):
        q, k, v = (w(hidden).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = llama.rotate(q, rope), llama.rotate(k, rope)
        mixed = self.inner(q.transpose(1, 2), k.transpose(1, 2), v.flip(-2).transpose(1, 2), documents)
        return self.wo(mixed.transpose(1, 2).flatten(2))

    return patch.object(llama.Attention, "forward", forward)


@contextlib.contextmanager
def clipped_by_local_norm(made) -> Iterator[None]:
    """Each rank scales its gradients by the norm of its own part; the logged norm is right."""
    right = Reduction.__init__

    def with_own_norm(self, world, *, squared_norm, **named):
        right(self, world, squared_norm=squared_norm, **named)
        self.own = squared_norm.sqrt()

    def own_factor(self, max_norm):
        return self._correction * (max_norm / (self.own * self._correction + 1e-6)).clamp(max=1.0)

    with patch.object(Reduction, "__init__", with_own_norm), patch.object(Reduction, "gradient_factor", own_factor):
        yield


def without_positions(made):
    """Every context-parallel rank believes that its tokens are the first ones."""
    right = assemble.StepBatch.places
    return patch.object(assemble.StepBatch, "places", lambda self, rows, positions: right(self, rows, None))


def pipeline_not_normalised(made):
    """The pipeline's backward begins with sums, not with means."""
    right = pipeline.Pipeline.__init__

    def summed(self, stages, *, scale, **named):
        right(self, stages, scale=scale * made.tokens_per_step, **named)

    return patch.object(pipeline.Pipeline, "__init__", summed)


def embedding_loses_gradient(made):
    """What a compiled block gives back to the embedding is lost; no loss of the first step shows it."""
    right = assemble.build_stage

    def build(recipe, *arguments, **named):
        built = right(recipe, *arguments, **named)
        embedding = built.model.tok_embeddings
        if recipe.compile.blocks and embedding is not None:
            embedding.register_forward_hook(lambda module, inputs, output: _without_gradient(output))
        return built

    return patch.object(assemble, "build_stage", build)


def _without_gradient(output):
    output.register_hook(torch.zeros_like)
    return output


def float8_labelled_bf16(made):
    """The recipe says bf16, and its layers multiply in float8."""
    float8 = Float8Layers(Float8Tensorwise(all_gather=False))
    return patch.object(Bf16, "implementation", lambda self: float8)


def bf16_labelled_float8(made):
    """The recipe says float8, and no layer is converted."""
    return patch.object(Float8Layers, "convert", lambda self, model, device: None)


def one_rank_alone(made):
    """The last rank's copy of a replicated gradient differs; rank 0 has the right one."""
    right = assemble.Stage.finish_gradients

    def finish(self):
        right(self)
        if os.environ["RANK"] == str(made.world - 1) and self.model.norm is not None:
            self.model.norm.weight.grad.mul_(1.01)

    return patch.object(assemble.Stage, "finish_gradients", finish)


FAULTS: dict[str, Callable] = {
    "not divided": not_divided,
    "norms not summed": norms_not_summed,
    "values permuted": values_permuted,
    "clipped by local norm": clipped_by_local_norm,
    "without positions": without_positions,
    "pipeline not normalised": pipeline_not_normalised,
    "embedding loses gradient": embedding_loses_gradient,
    "float8 labelled bf16": float8_labelled_bf16,
    "bf16 labelled float8": bf16_labelled_float8,
    "one rank alone": one_rank_alone,
}
