"""What a run leaves behind while it happens: rows of metrics, its status, its result, and what its panel suggests."""

import re
import shlex
import time
from dataclasses import replace

import pytest
import torch

from tests import tiny
from titanlab.checkpoint import Position
from titanlab.costs import meter
from titanlab.distributed import World
from titanlab.records import Outcome, OutcomeKind
from titanlab.system import terminal
from titanlab.techniques.precision.cast import ScaledStep
from titanlab.techniques.precision.cast_schema import Fp16
from titanlab.train import Totals
from titanlab.train.recording import StepEnds, next_steps, open_recorder

CPU = torch.device("cpu")
ALONE = World(rank=0, world=1, local_rank=0, device=CPU)


@pytest.mark.parametrize(
    ("given", "supported", "named"),
    [
        ({"bf16": True}, False, "bf16"),
        ({"precision": Fp16()}, False, "fp16"),
        ({"bf16": True}, True, None),
        ({}, False, None),
    ],
)
def test_a_cpu_without_units_for_the_precision_is_told(tmp_path, capsys, monkeypatch, given, supported, named):
    for name in ("bf16", "fp16"):
        monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda: supported)
    made = tiny.recipe(tmp_path, **given)
    with open_recorder(made, tiny.begin(made), ALONE, attempt=1, position=Position()):
        pass
    rule = f"this CPU has no units for {named}, and multiplies tens of times more slowly than in fp32"
    line = f"warning: precision={named}: {rule}; try precision=fp32\n"
    assert capsys.readouterr().err == (line if named else "")


@pytest.mark.parametrize(("skipped", "shown"), [((0, 0), False), ((0, 2), True), ((1, 1), True)])
def test_the_end_of_a_run_counts_the_steps_that_updated_nothing(tmp_path, capsys, skipped, shown):
    made = tiny.recipe(tmp_path, steps=2)
    run = tiny.begin(made)
    with open_recorder(made, run, ALONE, attempt=1, position=Position()) as recorder:
        recorder.start()
        for step, count in enumerate(skipped, start=1):
            scaled = ScaledStep(1024.0, count, tolerated=True)
            recorder.record(step, Totals(4.0, float("inf"), 100, 0, scaled), rate=1e-3, tokens_seen=100 * step)
        outcome = recorder.finish(Outcome(kind=OutcomeKind.DONE, step=2, steps=2))
    assert outcome.metrics[meter.SKIPPED_STEPS] == skipped[-1]
    line = re.search(r"skipped steps +(\d+): their gradients were not finite", capsys.readouterr().out)
    assert (line is not None) == shown
    assert line is None or int(line[1]) == skipped[-1]


def test_in_a_pipe_the_first_step_of_a_resumed_run_is_over_after_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(terminal, "_SLOW_SECONDS", 0.8)
    made = tiny.recipe(tmp_path, steps=100, log_every=50)
    run = tiny.begin(made)
    with open_recorder(made, run, ALONE, attempt=1, position=Position(step=60)) as recorder:
        recorder.start()
        recorder.record(61, Totals(4.0, 1.0, 100, 0), rate=1e-3, tokens_seen=6100)
        recorder.started({"python": 0.1})
        # Longer than a slow phase and a tick of its thread.
        time.sleep(1.6)
        recorder.finish(Outcome(kind=OutcomeKind.DONE, step=61, steps=100))
    assert "step 61 …" not in capsys.readouterr().out


def test_logging_beside_the_next_step_takes_nothing_from_it(tmp_path, capsys):
    made = tiny.recipe(tmp_path, steps=2, log_every=1)
    run = tiny.begin(made)
    with open_recorder(made, run, ALONE, attempt=1, position=Position()) as recorder:
        recorder.start()
        begun = time.perf_counter()
        for step, at, next_runs in ((1, 1.0, True), (2, 3.0, False)):
            end = {"ended": begun + at, "next_runs": next_runs}
            recorder.record(step, Totals(4.0, 1.0, 100, 0), rate=1e-3, tokens_seen=100 * step, **end)
    _, second = run.metrics("train")
    assert second[meter.STEP_SECONDS] == pytest.approx(2.0, abs=1e-9)
    capsys.readouterr()


def test_the_panel_suggests_what_can_be_done(tmp_path):
    run = tiny.begin(tiny.recipe(tmp_path / "two words"))
    run.tokenizer.mkdir(exist_ok=True)
    done = Outcome(kind=OutcomeKind.DONE, cause="", step=2, steps=2, metrics={})
    assert [line.split()[0] for line in next_steps(done, run)] == ["less"]
    step = run.checkpoints / "step-00000002"
    step.mkdir(parents=True)
    (step / "index.json").write_text("{}")
    assert next_steps(done, run)[0].startswith("titanlab generate ")
    for kind in (OutcomeKind.DONE, OutcomeKind.CANCELLED, OutcomeKind.OOM):
        for line in next_steps(replace(done, kind=kind), run):
            (folder,) = (word for word in shlex.split(line) if "two words" in word)
            assert folder.startswith(str(run.path))


class Event:
    """Of a GPU: reached at a time of the device, in milliseconds."""

    def __init__(self, at):
        self.at = at

    def record(self):
        pass

    def elapsed_time(self, later):
        return later.at - self.at


def test_steps_of_a_gpu_end_when_it_has_computed_them_whenever_the_host_reads_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(5000.0))
    ends = StepEnds(torch.device("cuda", 0), clock=iter([100.0]).__next__)
    assert [ends.after(Event(at)) for at in (5250.0, 5500.0, 6500.0)] == [100.25, 100.5, 101.5]
    assert StepEnds(CPU).after(None) is None
