"""Every layout trains the same as one process, and one process trains as a bare loop does.

Tolerances are the project's bars in fp32: 1e-5, relative, for losses and gradient norms of five steps, and
‖Δ‖/‖reference‖ ≤ 1e-5 for every tensor. Adam divides by the gradient's own size, so that with its usual eps of 1e-8
an element whose gradient is hardly more than rounding moves as far as any other: on one kind of CPU that alone was
1.8e-5 of a parameter. With 1e-6, as in the matrix of layouts, such elements stay where they are.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from tests import tiny
from tests.planted_schema import Planted
from titanlab.data import Synthetic, source
from titanlab.prove import TrainingTrace, tolerances
from titanlab.prove.parity import TraceDifference, compare
from titanlab.recipe import Recipe
from titanlab.techniques.model import llama
from titanlab.techniques.optimizer.contract import rate_factor
from titanlab.train.initialise import initialise

BAR = tolerances.FP32
COMMON = {"steps": 5, "eps": 1e-6, "at_end": False}
# What the reference has in common with a layout; tests name it by its key.
KINDS = {
    "plain": COMMON,
    "clipped": {**COMMON, "max_grad_norm": 0.3},
    "tied": {**COMMON, "tied_embeddings": True},
    "gaps": {**COMMON, "data": Planted(gaps=True)},
    "bf16": {**COMMON, "bf16": True},
    "documents": {**COMMON, "data": Synthetic(vocab_size=256, document_mask=True, document_tokens=6, gaps=True)},
}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("plain", {"shard": 3}),
        ("clipped", {"shard": 2, "cpu_offload": True}),
        ("gaps", {"replicate": 2, "microbatch": 3}),
        ("gaps", {"replicate": 2, "shard": 2}),
        pytest.param("clipped", {"replicate": 2}, marks=pytest.mark.full),
        # Other rows are in the matrix of layouts.
        pytest.param("plain", {"shard": 2, "reshard_after_forward": "never"}, marks=pytest.mark.full),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(f"{key}={each}" for key, each in value.items()),
)
def test_a_layout_trains_as_one_process(traces, kind, layout):
    found = traces(**KINDS[kind], **layout)
    difference = compare(traces(**KINDS[kind]), found)
    assert len(found.losses) == 5
    assert difference.largest <= BAR, difference


class BareLoop:
    """The same training written plainly: the whole batch at once, the mean over labels that count, torch's clipping."""

    def __init__(self, made: Recipe) -> None:
        self.made = made
        self.model = llama.LlamaModel(made.model, seq_len=made.training.seq_len)
        initialise(self.model, made.model.initial_values(), made.seed)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """With document masks: of each document by itself. Token 0 ends one."""
        if not self.made.data.document_mask:
            return self.model(tokens)
        ends = [(row[:-1] == 0).nonzero().flatten() + 1 for row in tokens]
        return torch.stack(
            [
                torch.cat([self.model(document.unsqueeze(0))[0] for document in row.tensor_split(cuts)])
                for row, cuts in zip(tokens, ends, strict=True)
            ]
        )

    def trace(self) -> TrainingTrace:
        made, model = self.made, self.model
        stream = source.open_train(
            made.data, seed=made.seed, seq_len=made.training.seq_len, global_batch=made.training.global_batch, rank=0, ranks=1
        )  # fmt: skip
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": made.optimizer.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=tuple(made.optimizer.betas),
            eps=made.optimizer.eps,
        )
        found = TrainingTrace()
        for step in range(1, made.training.steps + 1):
            batch = stream.next_batch()
            logits = self.logits(torch.from_numpy(batch.tokens))
            loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.labels).flatten())
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), made.training.max_grad_norm)
            if step == 1:
                found.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            for group in optimizer.param_groups:
                group["lr"] = made.optimizer.lr * rate_factor(
                    made.optimizer.schedule, step=step, steps=made.training.steps
                )
            optimizer.step()
            found.losses.append(loss.item())
            found.grad_norms.append(norm.item())
        found.parameters = {name: p.detach() for name, p in model.named_parameters()}
        return found


@pytest.mark.parametrize("kind", ["clipped", "gaps", "tied", "documents"])
def test_one_process_trains_as_a_bare_loop(traces, tmp_path, kind):
    difference = compare(BareLoop(tiny.recipe(tmp_path, **KINDS[kind])).trace(), traces(**KINDS[kind]))
    assert difference.largest <= BAR, difference


def test_clipping_was_active_and_gaps_were_uneven(traces, tmp_path):
    clipped = traces(**KINDS["clipped"])
    assert min(clipped.grad_norms) > 0.3
    norms = [torch.linalg.vector_norm(gradient).item() for gradient in clipped.gradients.values()]
    assert math.hypot(*norms) == pytest.approx(0.3, rel=1e-5)
    valid = {"gaps": [], "documents": []}
    for kind, counts in valid.items():
        data = tiny.recipe(tmp_path, **KINDS[kind]).data
        for rank in range(4):
            stream = source.open_train(data, seed=0, seq_len=32, global_batch=12, rank=rank, ranks=4)
            counts.append(int((stream.next_batch().labels != source.IGNORE).sum()))
    # Of sample g the share (g % 4) / 3 does not count, or (g % 4) / 4; the first label of a document counts.
    assert valid == {"gaps": [96, 66, 33, 0], "documents": [96, 72, 48, 24]}


@pytest.mark.full
def test_bf16_in_one_process_is_bf16_in_two(traces):
    one, two, exact = traces(**KINDS["bf16"]), traces(**KINDS["bf16"], shard=2), traces(**KINDS["plain"])
    difference, to_exact = compare(one, two), compare(exact, one)
    # Both round every activation alike, to 8 significant bits. A weight's gradient is rounded once for all sequences
    # or once for each rank's half of them, and summed in fp32 from there: 2^-9 each time. So two layouts are nearer to
    # each other than to fp32, and gradients differ by no more than a few roundings, of which 2^-7 is four.
    assert difference.gradient[0] <= 2**-7, difference
    for name in ("loss", "grad_norm", "gradient", "parameter"):
        assert getattr(difference, name) < getattr(to_exact, name), (name, difference, to_exact)
    # Both are bf16, with fp32 masters.
    for found in (one, two):
        assert compare(exact, found).gradient[0] > 2**-10
        assert {tensor.dtype for tensor in (*found.gradients.values(), *found.parameters.values())} == {torch.float32}


# The checker


def a_trace(**changes):
    whole = {"a": torch.ones(3), "b": torch.full((2, 2), 2.0)}
    found = {"losses": [2.0, 1.0], "grad_norms": [1.0, 1.0], "gradients": whole, "parameters": whole}
    return TrainingTrace(**{**found, **changes})


def test_differences_are_relative_and_name_the_tensor():
    changed = {"a": torch.ones(3), "b": torch.tensor([[2.0, 2.0], [2.0, 2.4]])}
    difference = compare(a_trace(), a_trace(losses=[2.0, 1.5], grad_norms=[1.0, 0.8], gradients=changed))
    assert difference.loss == 0.5
    assert difference.grad_norm == pytest.approx(0.2)
    assert difference.gradient == (pytest.approx(0.1), "b")
    assert difference.parameter[0] == 0.0
    assert difference.largest == 0.5
    assert "gradient 1.0e-01 (b)" in str(difference)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_the_largest_difference(bad):
    for changes in (
        {"losses": [2.0, bad]},
        {"losses": [bad, 1.0]},
        {"grad_norms": [1.0, bad]},
        {"gradients": {"a": torch.ones(3), "b": torch.full((2, 2), bad)}},
        {"parameters": {"a": torch.full((3,), bad), "b": torch.full((2, 2), 2.0)}},
    ):
        assert compare(a_trace(), a_trace(**changes)).largest == math.inf
        assert compare(a_trace(**changes), a_trace()).largest == math.inf


def test_a_zero_of_the_reference_is_held_to():
    zero = {"a": torch.zeros(3)}
    same = compare(a_trace(gradients=zero, losses=[0.0]), a_trace(gradients=zero, losses=[0.0]))
    assert same == TraceDifference(loss=0.0, grad_norm=0.0, gradient=(0.0, "a"), parameter=(0.0, "b"))
    assert compare(a_trace(losses=[0.0]), a_trace(losses=[1e-6])).loss > 1
    assert compare(a_trace(gradients=zero), a_trace(gradients={"a": torch.full((3,), 1e-6)})).gradient[0] > 1


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"losses": [2.0]}, "losses of 2 steps against 1"),
        ({"gradients": {"a": torch.ones(3)}}, r"gradients differ in names: \['b'\]"),
        ({"parameters": {"a": torch.ones(1), "b": torch.ones(2, 2)}}, "parameters differ in shape: a is"),
    ],
)
def test_other_steps_or_tensors_are_no_difference_but_an_error(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        compare(a_trace(), a_trace(**changes))
