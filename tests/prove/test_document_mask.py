"""Documents in packed sequences are as if they were alone, on every layout.

Logits of packed documents are those of each document alone, from one process and from transformers, within 1e-5 of the
largest; and layouts train on them as one process does. docs/document-masks.md shows the rows; `make test-full`
writes it.
"""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests import tiny
from tests.prove import documents
from tests.prove import test_experts as experts
from tests.prove.pages import Table, columns
from tests.prove.parity_rows import COMMON, OnLayout
from tests.weights.huggingface import made as folders
from titanlab.data import Synthetic
from titanlab.data.contract import Separators
from titanlab.options import schema_of
from titanlab.prove import tolerances
from titanlab.prove.parity import compare
from titanlab.techniques.model.attention import Packed
from titanlab.train import assemble
from titanlab.train import generate as sampling
from titanlab.train.initialise import fill
from titanlab.train.weights import open_folder

pytestmark = pytest.mark.on_page
BAR = tolerances.FP32
FULL = [pytest.mark.full]
ROWS = [
    ({}, []),
    ({"replicate": 2}, FULL),
    ({"shard": 2, "microbatch": 1}, FULL),
    ({"tensor": 2}, FULL),
    ({"tensor": 2, "sequence_parallel": False, "loss_parallel": False}, FULL),
    ({"context": 2}, []),
    ({"context": 2, "context_method": "all_gather"}, FULL),
    ({"context": 4}, FULL),
    ({"context": 4, "context_method": "all_gather"}, FULL),
    ({"pipeline": 2}, []),
    ({"pipeline": 2, "schedule": "zbv"}, FULL),
    ({"pipeline": 2, "context": 2, "tensor": 2}, FULL),
    ({"shard": 2, "context": 4, "context_method": "all_gather"}, FULL),
    ({"pipeline": 2, "shard": 2, "context": 2, "tensor": 2}, FULL),
]
TRAINED = [
    ({"context": 2, "pipeline": 2, "schedule": "interleaved_1f1b"}, FULL),
    *((given, FULL) for given, _ in ROWS if given),
    ({"fused": True, "tensor": 2}, FULL),
    ({"blocks": True, "backend": "aot_eager", "context": 2}, FULL),
    ({"blocks": True, "backend": "inductor"}, FULL),
    ({"pipeline": 2, "shard": 2, "schedule": "interleaved_zero_bubble"}, FULL),
    ({"ac": "selective_op"}, FULL),
    ({"ac": "selective_op", "context": 2, "blocks": True, "backend": "aot_eager"}, FULL),
    ({"ac": "full", "pipeline": 2, "tensor": 2}, FULL),
    ({"loss_chunk": 12, "tensor": 2}, FULL),
]


TABLE = Table("document-masks.md", [[OnLayout(given).label, str(OnLayout(given).layout.world)] for given, _ in TRAINED])


def params(rows):
    return [pytest.param(given, id=OnLayout(given).label, marks=marks) for given, marks in rows]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder of Hugging Face's with random weights large enough for logits of the size of 1."""
    config = {**folders.LLAMA_3_1, "num_hidden_layers": 4}
    return folders.folder(tmp_path_factory.mktemp("hub") / "llama", config)


def of_folder(path):
    source = open_folder(path, "x")
    model = sampling._filled(source, documents.SEQ, torch.float32, torch.device("cpu"))
    fill(model, source)
    return model


@pytest.fixture(scope="module")
def alone(hub):
    return documents.alone(of_folder(hub))


def recipe(folder, hub, given):
    keys = OnLayout(given).keys({**COMMON, "global_batch": len(documents.LENGTHS), "seq_len": documents.SEQ})
    keys.pop("layers")
    data = Synthetic(vocab_size=256, document_mask=True)
    return tiny.recipe(folder, model=open_folder(hub, "x").model, data=data, init_from=str(hub), **keys)


def distance(found, wanted):
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize("given", params(ROWS))
def test_logits_are_those_of_documents_alone(pool, hub, alone, tmp_path, given):
    found = documents.of_layout(pool, recipe(tmp_path, hub, given))
    assert distance(found, alone) <= BAR


def of_transformers(path):
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    return documents.alone(lambda tokens: theirs(tokens).logits)


@pytest.mark.full
def test_documents_alone_are_those_of_transformers(hub, alone):
    assert distance(alone, of_transformers(hub)) <= BAR
    assert alone.std() > 0.5


@pytest.mark.parametrize("family", [pytest.param(name, marks=FULL) for name in ("qwen 3", *folders.WITH_EXPERTS)])
def test_packed_documents_of_every_family_are_those_of_transformers(tmp_path, family):
    path = folders.folder(tmp_path / "hub", folders.FAMILIES[family])
    tokens = torch.from_numpy(documents.packed().tokens)
    starts = torch.from_numpy(Separators(end=0).starts(documents.packed().tokens))
    with torch.no_grad():
        packed = of_folder(path)(tokens, torch.arange(documents.SEQ) - starts, starts)
    assert distance(packed, of_transformers(path)) <= BAR


def off_by_one(hub):
    """The last token of a document is the next one's first."""
    right = Separators.starts
    return patch.object(Separators, "starts", lambda self, tokens: right(self, np.roll(tokens, -1, axis=1)))


def of_the_first_microbatch(hub):
    """Every microbatch gets the documents of the first."""
    right = assemble.StepBatch.places
    return patch.object(assemble.StepBatch, "places", lambda self, rows, positions: right(self, slice(0, 1), positions))


def unmasked(hub):
    """Positions restart, and attention is over the whole sequence."""
    right = Packed.arguments
    return patch.object(Packed, "arguments", lambda self, rows: right(replace(self, starts=self.starts * 0), rows))


def faulty(made, fault):
    with fault(made):
        return documents.of_rank(made)[-1]


@pytest.mark.parametrize("fault", [off_by_one, unmasked])
def test_a_planted_fault_is_found(pool, hub, alone, tmp_path, fault):
    [found] = pool.run(1, faulty, recipe(tmp_path, hub, {}), fault)
    assert distance(found, alone) > 1000 * BAR


DOCUMENTS = Synthetic(vocab_size=256, document_mask=True, document_tokens=6, gaps=True)
# The whole square is computed with a mask.
REFERENCE = {"attention": "math"}


def keys_of(given):
    keys = OnLayout(given).keys({**COMMON, "data": DOCUMENTS})
    if "ac" in keys:
        keys["ac"] = schema_of("ac", keys["ac"])()
    return keys


def traced_with(made, run, fault):
    with fault(made):
        return tiny.traced(made, run)


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=each.id, marks=each.marks) for row, each in enumerate(params(TRAINED))]
)
def test_layouts_train_as_one_process(traces, row):
    given, _ = TRAINED[row]
    difference = compare(traces(**keys_of(REFERENCE)), traces(**keys_of(given)))
    assert difference.largest <= BAR, difference
    TABLE.add(row, columns(difference))


def test_the_page_shows_these_rows():
    TABLE.check()


EXPERTS = [
    ({"tensor": 2, "expert": 2}, FULL),
    ({"shard": 2, "context": 2, "expert": 2}, FULL),
    ({"pipeline": 2, "context": 2, "expert": 2}, FULL),
]


@pytest.mark.parametrize("given", params(EXPERTS))
def test_models_with_experts_train_as_one_process(traces, given):
    one, every = (traces(**experts.keys_of("qwen3", each), data=DOCUMENTS) for each in ({}, given))
    difference = compare(one, every)
    assert difference.largest <= BAR, difference


@pytest.mark.full
def test_documents_of_another_microbatch_are_found(pool, traces, tmp_path):
    made = tiny.recipe(tmp_path, **keys_of({"microbatch": 1}))
    [found] = pool.run(1, traced_with, made, tiny.begin(made), of_the_first_microbatch)
    assert compare(traces(**keys_of(REFERENCE)), found).largest > 1000 * BAR
