"""Compiled runs train as eager ones, and compile each function once: 5 steps, gradients and parameters compared.

The bar is 1e-6 in fp32, relative, as `tests/prove/test_parity_matrix.py` measures it. Traced code (aot_eager) holds the same
operations in the same order. Inductor fuses: it takes other exponentials and sums rows in another order, which is a few
units of the last place (6e-8) in losses and gradients. Parameters show five times as much, because Adam divides by the
gradient's own size: they have a bar of their own there.
"""

import inspect
import os
import warnings
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from torch._dynamo import utils

from tests import tiny
from titanlab.distributed import ALONE, joined
from titanlab.prove import parity
from titanlab.prove.parity import compare
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, MemoryBudget, SelectiveLayer, SelectiveOp
from titanlab.techniques.compile.compiler import TorchCompiler, put_states_before_objects
from titanlab.techniques.compile.schema import Compile
from titanlab.techniques.precision.float8_schema import Float8Rowwise
from titanlab.techniques.schedule.published_schema import ZBV, DualPipeV, Interleaved1F1B

BAR = 1e-6
INDUCTOR_PARAMETERS = 5e-6
COMMON = {"layers": 3, "steps": 5, "global_batch": 8, "eps": 1e-6, "at_end": False}


def traced(made, run, cache=None):
    """The trace of a run, and how often each function was compiled."""
    if cache is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch._dynamo.reset()
    utils.clear_compilation_metrics()
    utils.counters.clear()
    trace = parity.trace(made, run, joined(os.environ) or ALONE)
    compiled = Counter(record.co_name for record in utils.get_compilation_metrics() if record.co_name)
    assert sum(compiled.values()) == utils.counters["stats"]["unique_graphs"]
    return trace, dict(compiled)


@pytest.fixture
def eager(traces):
    # Checkpointed blocks are held to those that keep everything.
    return lambda given: traces(**{**COMMON, **{name: value for name, value in given.items() if name != "ac"}})


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Inductor's cache, kept between rows: what two rows have in common is generated once."""
    return str(tmp_path_factory.mktemp("inductor"))


# tests/prove/test_technique_matrix.py compiles on layouts.
QUICK = ("alone",)


def row(name, functions, **given):
    layer = [] if name in QUICK else [pytest.mark.full]
    return pytest.param(given, functions, id=name, marks=layer)


LOSS, PARTS = {"loss_sum": 1}, {"_statistics": 1, "_slope": 1}
WHOLE, SPLIT = {"forward": 1, **LOSS}, {"forward": 1, **PARTS}
AGAIN, IN_PART = {"recomputed_forward": 1}, {"partly_recomputed_forward": 1}
INTERLEAVED = {"pipeline": 2, "layers": 6, "microbatch": 2}
ROWS = [
    row("alone", WHOLE),
    # Without gradients everything is compiled once more; 3 rows are left for the last batch, which is filled up.
    row("validated", {"forward": 2, "loss_sum": 2}, validate_every=2, validation_sequences=11),
    row("fsdp, accumulated", WHOLE, shard=2, microbatch=2),
    row("fsdp, offloaded", WHOLE, shard=2, cpu_offload=True),
    row("tp", SPLIT, tensor=2),
    row("tp, whole logits", WHOLE, tensor=2, loss_parallel=False),
    row("cp, ring", WHOLE, context=2),
    row("fsdp, cp, tp", SPLIT, shard=2, context=2, tensor=2),
    # Only the last stage has a loss.
    row("pp, several stages a rank", WHOLE, pipeline_schedule=Interleaved1F1B(), **INTERLEAVED),
    row("pp, split backwards", WHOLE, pipeline_schedule=ZBV(), **INTERLEAVED),
    row("pp, cp, split backwards", WHOLE, pipeline=2, context=2, layers=4, microbatch=1, pipeline_schedule=DualPipeV()),
    row("ac: full", AGAIN | LOSS, ac=FullCheckpointing()),
    # Two kinds of blocks are two functions.
    row("ac: selective_layer", WHOLE | AGAIN, ac=SelectiveLayer(every=2)),
    row("ac: selective_op", IN_PART | LOSS, ac=SelectiveOp()),
    row("ac: memory_budget", WHOLE, ac=MemoryBudget(budget=0.5)),
    row("float8", WHOLE, precision=Float8Rowwise(), shard=2),
]


@pytest.mark.parametrize(("given", "functions"), ROWS)
def test_traced_blocks_train_as_eager_ones_and_are_compiled_once(pool, tmp_path, eager, given, functions):
    made = tiny.recipe(tmp_path, **{**COMMON, **given}, blocks=True, loss=True, backend="aot_eager")
    every = pool.run(made.world, traced, made, tiny.begin(made), limit_seconds=300.0)
    difference = compare(eager(given), every[0][0])
    assert difference.largest <= BAR, difference
    whole = {name: max(compiled.get(name, 0) for _, compiled in every) for name in functions}
    assert whole == functions
    assert {name for _, compiled in every for name in compiled} == functions.keys()


@pytest.mark.full
@pytest.mark.parametrize(
    "given",
    [
        {},
        pytest.param({"mode": "max-autotune-no-cudagraphs"}, marks=pytest.mark.full),
        {"shard": 2, "tensor": 2},
        {"ac": SelectiveOp()},
        {"ac": MemoryBudget(budget=0.5)},
        {"validate_every": 2, "validation_sequences": 11},
    ],
    ids=lambda given: ", ".join(map(str, given)) or "alone",
)
def test_generated_kernels_train_as_eager_ones(pool, tmp_path, eager, cache, given):
    made = tiny.recipe(tmp_path, **{**COMMON, **given}, blocks=True, loss=True)
    trace, compiled = pool.run(made.world, traced, made, tiny.begin(made), cache, limit_seconds=600.0)[0]
    difference = compare(eager({name: value for name, value in given.items() if name != "mode"}), trace)
    assert max(difference.loss, difference.grad_norm, difference.gradient[0]) <= BAR, difference
    assert difference.parameter[0] <= INDUCTOR_PARAMETERS, difference
    assert set(compiled.values()) == ({2} if "validate_every" in given else {1})


def settings_while_compiling(made, run):
    """What the budget is for each graph that is cut into forward and backward."""
    from torch._functorch import config, partitioners

    seen, cut = [], partitioners.min_cut_rematerialization_partition

    def noted(*arguments, **named):
        seen.append(config.activation_memory_budget)
        return cut(*arguments, **named)

    with patch("torch._dynamo.backends.debugging.min_cut_rematerialization_partition", noted):
        traced(made, run)
    return seen, config.activation_memory_budget


def test_a_memory_budget_holds_for_blocks_only(pool, tmp_path):
    given = {"ac": MemoryBudget(budget=0.25), "blocks": True, "loss": True, "backend": "aot_eager_decomp_partition"}
    made = tiny.recipe(tmp_path, steps=2, **given)
    assert pool.run(1, settings_while_compiling, made, tiny.begin(made)) == [([0.25, 1.0], 1.0)]


def test_torch_still_has_what_is_patched():
    """The argument that is changed is the fourth, by its name; the patch is made once."""
    from torch._functorch import partitioners

    put_states_before_objects()
    patched = partitioners.functionalize_rng_ops
    put_states_before_objects()
    assert partitioners.functionalize_rng_ops is patched
    assert list(inspect.signature(inspect.unwrap(patched)).parameters)[3] == "num_sym_nodes"


def test_advice_that_nobody_can_follow_is_not_shown():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        TorchCompiler(Compile(loss=True, backend="eager")).compile_loss(lambda logits: logits)
        for text in (
            "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled.",
            "\nOnline softmax is disabled on the fly since Inductor decides to\nsplit the reduction.",
            "Something else.",
        ):
            warnings.warn(text, stacklevel=1)
    assert [str(each.message) for each in shown] == ["Something else."]
