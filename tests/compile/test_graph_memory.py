"""CUDA graphs without a GPU: what a graph returns becomes NaN at the next microbatch, as if it were overwritten."""

import os

import pytest
import torch

from tests import tiny
from tests.train.test_assemble import batch
from titanlab.distributed import ALONE, build_mesh, joined, open_world
from titanlab.techniques.compile.schema import MODES, Compile
from titanlab.train import assemble as assembly
from titanlab.train.assemble import assemble


def stepped(made, *, records, marks=True):
    """Loss and gradients of two steps, the loss of an evaluation, and the number of microbatches that were marked."""
    returned, marked = [], []

    def mark():
        marked.append(len(returned))
        if marks:
            overwrite()

    def overwrite():
        for tensor in returned:
            tensor.fill_(torch.nan)
        returned.clear()

    def loss_of(*arguments):
        loss = made_loss(*arguments)

        def computed(*inputs):
            found = loss(*inputs)
            returned.append(found.detach())
            return found

        return computed

    made_loss = assembly._loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "_loss", loss_of)
        patch.setattr(torch.compiler, "cudagraph_mark_step_begin", mark)
        patch.setattr(Compile, "records_graphs", records)
        with open_world(joined(os.environ) or ALONE, accelerator="cpu", seed=0, deterministic=False) as world:
            assembled = assemble(made, world, build_mesh(made.layout, "cpu"))
            assembled.after_update()
            parameters = dict(assembled.model.named_parameters())
            seen = set()

            def note(parameter):
                # A gradient that a backward returns is its graph's; later ones are added to it.
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    returned.append(parameter.grad.detach())

            for parameter in parameters.values():
                parameter.register_post_accumulate_grad_hook(note)
            found = []
            for _ in range(2):
                sums = assembled.forward_backward(assembled.to_device(batch()))
                found.append((float(sums.loss_sum), {name: p.grad.clone() for name, p in parameters.items()}))
                for parameter in parameters.values():
                    parameter.grad = None
                seen.clear()
            evaluated = float(assembled.evaluate(assembled.to_device(batch())).loss_sum)
    return found, evaluated, len(marked)


@pytest.mark.parametrize("microbatch", [4, 2, 1])
def test_what_outlives_a_microbatch_is_no_memory_of_graphs(tmp_path, microbatch):
    made = tiny.recipe(tmp_path, global_batch=4, microbatch=microbatch)
    expected, evaluated, none = stepped(made, records=False)
    found, again, marked = stepped(made, records=True)
    # Each microbatch of two steps, and one evaluation.
    assert (none, marked) == (0, 2 * 4 // microbatch + 1)
    assert again == evaluated
    for (loss, gradients), (mine, others) in zip(expected, found, strict=True):
        assert mine == loss
        assert all(torch.equal(gradients[name], others[name]) for name in gradients)


def test_the_overwriting_is_seen_without_copies(tmp_path, monkeypatch):
    monkeypatch.setattr(assembly.GraphMemory, "kept", lambda self, result: result)
    found, _, _ = stepped(tiny.recipe(tmp_path, global_batch=4, microbatch=2), records=True)
    assert found[0][0] != found[0][0]
    monkeypatch.undo()
    monkeypatch.setattr(assembly.GraphMemory, "keep_gradients", lambda self, parameters: None)
    found, _, _ = stepped(tiny.recipe(tmp_path, global_batch=4, microbatch=2), records=True)
    assert all(gradient.isnan().any() for gradient in found[0][1].values())


def test_what_records_graphs():
    assert {mode for mode in MODES if Compile(blocks=True, mode=mode).records_graphs} == {
        "reduce-overhead",
        "max-autotune",
    }
    assert Compile(loss=True, backend="cudagraphs").records_graphs
    assert not Compile(backend="cudagraphs").records_graphs
