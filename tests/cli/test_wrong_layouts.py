"""Wrong layouts and schedules: one line with key, value, rule and cure, at once; and each cure mends what it names.

The model is `debug`: 2 blocks, 4 heads, 2 key/value heads, 2048 tokens; a step has 8 sequences of 512.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from titanlab.distributed import Host

# What is typed, how the line begins, what its cure has in it, and an override that mends it: None where the cure names
# none. Words in <angle brackets> are files of the fixture `files`.
DEGREES = [
    ("parallelism.tensor=0", "parallelism.tensor=0: a degree is at least 1, or -1", "try 1", "parallelism.tensor=1"),
    ("parallelism.context=-2", "parallelism.context=-2: a degree is at least 1, or -1", "try 1", "parallelism.context=1"),
    ("parallelism.context=two", "parallelism.context=two: must be a whole number", "try 1", "parallelism.context=1"),
    ("parallelism=fsdp parallelism.tensor=-1 world=4", "parallelism.shard=-1: only one degree may be -1", "try parallelism.tensor=1", "parallelism.tensor=1"),
    ("parallelism=fsdp_tp", "parallelism.shard=-1: says 'the rest' of a world", "try world=2, or", "world=2"),
    ("parallelism=tp parallelism.pipeline=2 world=5", "world=5: the other degrees make 2, which does not divide it", "try world=4", "world=4"),
    ("parallelism.shard=2 parallelism.tensor=2 world=3", "world=3: the degrees make 4 (shard 2 × tensor 2)", "try world=4", "world=4"),
    ("parallelism=fsdp_tp_pp_pc world=16", "parallelism=fsdp_tp_pp_pc: is no option", "try fsdp_tp_pp_cp", "parallelism=fsdp_tp_pp_cp"),
    ("parallelism.expert=2", "parallelism.expert=2: the model has no experts", "try parallelism.expert=1", "parallelism.expert=1"),
]  # fmt: skip
TENSOR = [
    ("parallelism.tensor=3", "parallelism.tensor=3: must divide 4 attention heads", "=1 or 2", "parallelism.tensor=2"),
    ("parallelism.tensor=4", "parallelism.tensor=4: must divide 2 key/value heads", "=1 or 2", "parallelism.tensor=2"),
    ("parallelism.tensor=4 model.kv_heads=4 model.ffn_dim=190", "parallelism.tensor=4: must divide the 190 rows of layers.0.feed_forward.w1.weight", "=1 or 2", "parallelism.tensor=2"),
    ("parallelism.tensor=4 model.kv_heads=4 model.vocab_size=6 data.vocab_size=5", "parallelism.tensor=4: leaves a process without a row of tok_embeddings.weight, which has 6", "=1 or 2", "parallelism.tensor=2"),
    ("parallelism.tensor=2 training.seq_len=33 training.microbatch=1", "parallelism.tensor=2: with sequence_parallel, must divide the 33 tokens", "or parallelism.sequence_parallel=false", "parallelism.sequence_parallel=false"),
    ("parallelism.tensor=2 training.seq_len=999999999 training.microbatch=1", "parallelism.tensor=2: with sequence_parallel, must divide the 999999999 tokens", "try parallelism.tensor=1, or", "parallelism.tensor=1"),
    ("parallelism.shard=3 parallelism.tensor=2 training.global_batch=9", "parallelism.shard=3: with tensor=2, cannot cut the 2048 rows of tok_embeddings.weight into 6 equal parts, nor its 64 columns into 3", "=2 or 4, or parallelism.tensor=1", "parallelism.tensor=1"),
    ("parallelism.context=3 parallelism.tensor=2 training.seq_len=516", "parallelism.context=3: with tensor=2, cannot cut the 2048 rows", "=2 or 4, or parallelism.tensor=1", "parallelism.context=2"),
    ("parallelism.async_tensor=true", "parallelism.async_tensor=true: interleaves the collectives of tensor parallelism, and tensor=1", "try false", "parallelism.async_tensor=false"),
    ("parallelism.async_tensor=true parallelism.tensor=2", "parallelism.async_tensor=true: needs symmetric memory between GPUs", "try false", "parallelism.async_tensor=false"),
]  # fmt: skip
CONTEXT = [
    ("parallelism.context=3", "training.seq_len=512: must be a multiple of 6: two chunks for each of 3", "try 510", "training.seq_len=510"),
    ("parallelism.context=2 training.seq_len=6", "training.seq_len=6: must be a multiple of 4", "try 8", "training.seq_len=8"),
    ("parallelism.context=2 parallelism.context_method=rings", "parallelism.context_method=rings: no such choice", "choose one of ring, all_gather", None),
    ("parallelism.context=2 model.attention=math", "model.attention=math: writes out all scores, and context=2", "try auto", "model.attention=auto"),
    ("parallelism.context=2 model.attention=cudnn", "model.attention=cudnn: needs a GPU", "try auto, flash or math", "model.attention=auto"),
]  # fmt: skip
DATA = [
    ("parallelism=fsdp_cp world=12", "training.global_batch=8: must be a multiple of the 6 data-parallel", "try 6", "training.global_batch=6"),
    ("parallelism.replicate=100000000", "training.global_batch=8: must be a multiple of the 100000000", "try 100000000", None),
    ("parallelism.pipeline=2 training.microbatch=3", "training.microbatch=3: must divide the 8 sequences", "try 2 or 4", "training.microbatch=2"),
    ("parallelism.shard=2 parallelism.context=2 training.microbatch=8", "training.microbatch=8: must divide the 4 sequences", "try 2 or 4", "training.microbatch=4"),
    ("training.global_batch=999999999 training.microbatch=2", "training.microbatch=2: must divide the 999999999 sequences", "try 1 or 3", "training.microbatch=3"),
    ("parallelism.shard=2 parallelism.symmetric_memory=true", "parallelism.symmetric_memory=true: is memory between GPUs", "try false", "parallelism.symmetric_memory=false"),
    ("parallelism.replicate=2 parallelism.cpu_offload=true", "parallelism.cpu_offload=true: moves sharded parameters, and nothing is sharded", "try parallelism.shard=2", "parallelism.shard=2"),
    ("parallelism.reshard_after_forward=sometimes", "parallelism.reshard_after_forward=sometimes: no such choice", "choose one of auto, always, never", None),
]  # fmt: skip
PIPELINE = [
    ("parallelism.pipeline=3", "parallelism.pipeline=3: 1f1b makes 3 stages of it, more than the 2 blocks", "=1 or 2, or a model of more blocks", "parallelism.pipeline=2"),
    ("parallelism.pipeline=2 schedule=zbv", "parallelism.pipeline=2: zbv makes 4 stages of it, more than the 2 blocks", "or a schedule with fewer stages a rank", "parallelism.pipeline=1"),
    ("parallelism.pipeline=2 model.tied_embeddings=true", "parallelism.pipeline=2: the head is the embedding's table", "or model.tied_embeddings=false", "model.tied_embeddings=false"),
    ("parallelism.split=[1,1]", "parallelism.split=[1,1]: says where a pipeline is cut, and parallelism.pipeline=1", "try null", "parallelism.split=null"),
    ("parallelism.pipeline=2 parallelism.split=[1,1,0]", "parallelism.split=[1,1,0]: has 3 numbers of blocks, and the schedule has 2 stages", "try null for a balanced split, or", "parallelism.split=null"),
    ("parallelism.pipeline=2 parallelism.split=[1,2]", "parallelism.split=[1,2]: must add up to the model's 2 blocks", "try null", "parallelism.split=null"),
    ("parallelism.pipeline=2 parallelism.split=[-1,3]", "parallelism.split=[-1,3]: must add up to the model's 2 blocks", "try null", "parallelism.split=null"),
    ("parallelism.pipeline=3 model.layers=4 parallelism.split=[2,0,2]", "parallelism.split=[2,0,2]: must add up to the model's 4 blocks, with one at least for each stage between", "try null", "parallelism.split=null"),
    ("parallelism.pipeline=2 parallelism.split=[layers.7]", "parallelism.split=[layers.7]: the model has no piece layers.7", "its pieces are tok_embeddings, layers.0, layers.1, norm, output", None),
    ("parallelism.pipeline=2 parallelism.split=[layers.0,layers.1]", "parallelism.split=[layers.0,layers.1]: must name a piece for each of the 1 stages after the first", "try null", "parallelism.split=null"),
    ("parallelism.pipeline=3 model.layers=4 parallelism.split=[layers.3,layers.1]", "parallelism.split=[layers.3,layers.1]: stage 1 would begin with layers.3 and end before layers.1", "in the order of the forward pass", None),
    ("parallelism.pipeline=2 parallelism.split=[tok_embeddings]", "parallelism.split=[tok_embeddings]: stage 0 would begin with tok_embeddings and end before", "in the order of the forward pass", None),
    ("parallelism.pipeline=2 parallelism.split=2", "parallelism.split=2: must be a list of texts or null", "try null", "parallelism.split=null"),
]  # fmt: skip
TWO = "parallelism.pipeline=2 model.layers=4 schedule="
SCHEDULE = [
    (f"{TWO}zero_bubble", "schedule=zero_bubble: is no option of this group", "try interleaved_zero_bubble; known: 1f1b,", "schedule=interleaved_zero_bubble"),
    (f"{TWO}1f1b schedule.stages_per_rank=2", "schedule.stages_per_rank=2: is no key of this recipe; it belongs to another schedule", "try schedule=", "schedule=looped_bfs"),
    (f"{TWO}interleaved_1f1b schedule.stages_per_rank=0", "schedule.stages_per_rank=0: every rank has at least one stage", "try 2", "schedule.stages_per_rank=2"),
    (f"{TWO}zbv schedule.stages_per_rank=3", "schedule.stages_per_rank=3: stages go through the ranks there and back", "or schedule=interleaved_zero_bubble", "schedule.stages_per_rank=2"),
    (f"{TWO}interleaved_1f1b schedule.stages_per_rank=4", "parallelism.pipeline=2: interleaved_1f1b makes 8 stages of it, more than the 4 blocks", "or a schedule with fewer stages a rank", "parallelism.pipeline=1"),
    (f"{TWO}dualpipe_v training.microbatch=4", "schedule=dualpipe_v: needs at least 4 microbatches, one for each of its stages, and a step has 2", "try schedule=zbv, or", "schedule=zbv"),
    (f"{TWO}dualpipe_v training.global_batch=2", "schedule=dualpipe_v: needs at least 4 microbatches", "training.global_batch times 2", "training.global_batch=4"),
]  # fmt: skip
CSV = [
    (f"{TWO}csv", "schedule.file=: names no file", "titanlab schedule 1f1b --csv my.csv", None),
    (f"{TWO}csv schedule.file=<nope.csv>", "schedule.file=<nope.csv>: cannot be read (No such file or directory)", "titanlab schedule 1f1b --csv my.csv", None),
    (f"{TWO}csv schedule.file=<empty.csv>", "schedule.file=<empty.csv>: has no action", "one line a rank", None),
    (f"{TWO}csv schedule.file=<malformed.csv>", "schedule.file=<malformed.csv>: line 2, cell 2: '1X0' is not an action", "as in 0F0", None),
    (f"{TWO}csv schedule.file=<incomplete.csv>", "schedule.file=<incomplete.csv>: line 2: 1B0, or I and W instead, is missing", "F and B once", None),
    (f"{TWO}csv schedule.file=<deadlock.csv>", "schedule.file=<deadlock.csv>: line 1, cell 1: 0B0 on rank 0 waits for 0F0", "after what it needs", None),
    (f"{TWO}csv schedule.file=<torn.csv>", "schedule.file=<torn.csv>: line 2, cell 3: 0F1: stage 0 is on rank 0 already", "on one rank", None),
    (f"{TWO}csv schedule.file=<one-rank.csv>", "schedule.file=<one-rank.csv>: has 1 lines, one a rank, and the pipeline has 2 ranks", "try parallelism.pipeline=1, or schedule=1f1b", "parallelism.pipeline=1"),
    (f"{TWO}csv schedule.file=<halves.csv>", "schedule.file=<halves.csv>: is for 1 microbatch a step, and a step has 8", "training.microbatch times 8", "training.microbatch=8"),
]  # fmt: skip
CASES = [*DEGREES, *TENSOR, *CONTEXT, *DATA, *PIPELINE, *SCHEDULE, *CSV]
FILES = {
    "empty.csv": "\n",
    "malformed.csv": "0F0,0B0\n1F0,1X0\n",
    "incomplete.csv": "0F0,0B0\n1F0\n",
    "deadlock.csv": "0B0,0F0\n1F0,1B0\n",
    "torn.csv": "0F0,0B0\n1F0,1B0,0F1\n",
    "one-rank.csv": "0F0,0B0\n",
    "halves.csv": "0F0,0I0,0W0\n1F0,1I0,1W0\n",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, content in FILES.items():
        (folder / name).write_text(content)
    return folder


def filled(text: str, files: Path) -> str:
    return re.sub(r"<([^>]+)>", lambda name: str(files / name[1]), text)


def typed(arguments: str, files: Path, *more: str) -> list[str]:
    """The words of a case; of two for one key, the later."""
    words = ["data=synthetic", *shlex.split(filled(arguments, files)), *more]
    return list({word.partition("=")[0]: word for word in words}.values())


def test_there_are_many():
    assert len({arguments for arguments, *_ in CASES}) == len(CASES) > 50


@pytest.mark.parametrize(("arguments", "begins", "cure", "mend"), CASES, ids=lambda text: str(text)[:60])
def test_it_is_refused(command, files, arguments, begins, cure, mend):
    said = command(["train", *typed(arguments, files)])
    refusal = said.refusal
    assert said.err.startswith(f"error: {filled(begins, files)}")
    assert cure in refusal["cure"]
    # What the cure offers is what is tried: nobody is told to try what a test has not.
    if mend is None:
        # Nobody asks whether a world of a hundred million processes would start.
        assert "try " not in refusal["cure"] or refusal["value"] == "8"
        return
    key, _, value = mend.partition("=")
    assert re.search(rf"\b({re.escape(mend)}|{re.escape(value)}|{key}=|{key} times)", refusal["cure"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "begins", "mend"),
    [(arguments, begins, mend) for arguments, begins, _, mend in CASES if mend is not None],
    ids=lambda text: str(text)[:60],
)
def test_its_cure_cures(command, files, arguments, begins, mend):
    words = [
        word for word in typed(arguments, files, mend) if not word.startswith("schedule.") or "schedule=" not in mend
    ]
    if "stages_per_rank" in begins.partition("=")[0] and mend.startswith("schedule="):
        words.append("schedule.stages_per_rank=2")
    mended = command(["train", *words])
    assert (mended.code, mended.err, len(mended.started)) == (0, "", 1)


@pytest.mark.parametrize(
    ("environ", "arguments", "begins", "cure"),
    [
        ("6", "parallelism=fsdp_tp_pp", "WORLD_SIZE=6: the other degrees make 4, which does not divide it", "let one degree be -1"),
        ("6", "parallelism.tensor=2 parallelism.context=2", "WORLD_SIZE=6: the degrees make 4 (context 2 × tensor 2)", "start as many processes"),
        ("4", "parallelism=tp", "parallelism.tensor=4: must divide 2 key/value heads", "try parallelism.tensor=1 or 2"),
        ("4", "parallelism=tp world=2", "world=2: 4 processes were started", "try world=4, or null"),
    ],
)  # fmt: skip
def test_a_world_that_does_not_fit(command, files, environ, arguments, begins, cure):
    place = {"RANK": "1", "WORLD_SIZE": environ, "MASTER_PORT": "29500"}
    said = command(["train", *typed(arguments, files)], **place)
    assert said.err.startswith(f"error: {begins}")
    assert cure in said.refusal["cure"]


def test_what_async_tensor_needs_on_gpus(command, files, monkeypatch):
    monkeypatch.setattr(
        "titanlab.launch.execute.this_host", lambda: Host(accelerator="cuda", device="NVIDIA H200", count=2)
    )
    words = "parallelism.tensor=2 parallelism.async_tensor=true"
    refusal = command(["train", *typed(words, files)]).refusal
    assert (refusal["key"], refusal["cure"]) == ("parallelism.async_tensor", "try compile=block")
    words += " compile=block compile.backend=inductor"
    assert command(["train", *typed(words, files)]).code == 0
    refusal = command(["train", *typed(words, files, "parallelism.sequence_parallel=false")]).refusal
    assert refusal["cure"] == "try parallelism.sequence_parallel=true"


def test_one_wrong_layout_among_good_ones_starts_none(command, files):
    said = command(["train", "-m", *typed("parallelism.tensor=1,2,3", files)])
    assert said.err.startswith("error: parallelism.tensor=3: must divide 4 attention heads")
    assert said.refusal


def test_nothing_was_started(command, files, monkeypatch):
    """No process, no thread, no import of torch: there is nothing that could hang."""

    def never(*arguments, **how):
        raise AssertionError(f"started {arguments}")

    monkeypatch.setattr(subprocess, "Popen", never)
    monkeypatch.setattr(os, "fork", never)
    monkeypatch.setattr(threading.Thread, "start", never)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for arguments, *_ in (TENSOR[0], CONTEXT[0], PIPELINE[0], SCHEDULE[5], CSV[5]):
        assert command(["train", *typed(arguments, files)]).refusal
    assert "torch" not in sys.modules


@pytest.mark.parametrize(
    ("arguments", "environ", "begins"),
    [
        ("parallelism=tp", {"RANK": "2", "WORLD_SIZE": "3", "MASTER_PORT": "1"}, "parallelism.tensor=3: must divide 4"),
        *(
            pytest.param(arguments, {}, begins, marks=pytest.mark.full)
            for arguments, begins in [
                (
                    "parallelism=fsdp_tp_pp world=12",
                    "training.global_batch=8: must be a multiple of the 3 data-parallel",
                ),
                ("parallelism.context=3", "training.seq_len=512: must be a multiple of 6"),
                (
                    f"{TWO}csv schedule.file=<deadlock.csv>",
                    "schedule.file=<deadlock.csv>: line 1, cell 1: 0B0 on rank 0",
                ),
            ]
        ),
    ],
    ids=str,
)
def test_as_processes(refused_as_process, here, files, arguments, environ, begins):
    refused_as_process("train", *typed(arguments, files), begins=filled(begins, files), environ=environ)
    assert list(here.iterdir()) == []
