"""The commands of the pages that train run as a reader types them, with few and small steps.

What needs no torch is executed by test_commands.py, examples in Python by test_examples.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DECISIONS, PAGES, Command, blocks

# tests/extending and tests/gpt take the files and commands of these pages and run them.
OF_OTHER_TESTS = ("docs/extending.md", "docs/models-of-your-own.md")
# Commands that train and are not run here, by the begin of their text: what they need, or which tests run such ones.
ELSEWHERE = (
    # Many processes, or a GPU.
    r"(titanlab|torchrun) .*\+recipe=\w+gpus\b",
    r"torchrun --nproc-per-node 8",
    r"titanlab train .*\+recipe=\w+_cpu",
    r"titanlab train .*world=(4|8|16)",
    r"titanlab train .*world=2 .*compile=block",
    r"titanlab train model=llama3_2_1b ",
    # A scheduler, or weights that have to be imported first.
    r"titanlab (train|resume) .*(launch=|--config-dir ~)",
    r"titanlab train .*init_from=",
    r"titanlab export runs/single/small",
    # Trackers with keys of their own, and what was trained before.
    r"titanlab train .*tracker=\S+ tracker\.",
    r"titanlab train --from RUN",
    r"titanlab resume (RUN|SWEEP|quickstart_layouts) ?",
    # Programs of the repository: other tests run them.
    r"python benchmarks/",
    r"python -m (venv|pip)",
)
# What makes a run short; it comes last, and the last value of a key counts.
SHORT = (
    "training.steps=2 training.seq_len=64 training.global_batch=8 training.log_every=1 training.validate_every=0 "
    "optimizer.schedule.warmup_steps=1"
)
# Commands that train, or go on with what was trained; test_commands.py puts something in the place of these.
TRAINS = re.compile(r"titanlab (train|resume|generate|export)\b(?!.*(--cfg|--help))")


def plain(command: Command) -> str:
    """A command without the remark behind it."""
    return re.split(r" {2,}#", command.text)[0]


def to_execute(page: str) -> list[str]:
    """Commands that train, in the order of the page, and those of other programs that come before them."""
    if page in OF_OTHER_TESTS:
        return []
    found = [
        command
        for block in blocks(page)
        for command in block.commands()
        if not any(re.match(pattern, plain(command)) for pattern in ELSEWHERE)
    ]
    wrong = [command for command in found if (command.shown or "").startswith("error: ")]
    own = [plain(command) for command in found if command not in wrong]
    last = max((place for place, text in enumerate(own) if TRAINS.match(text)), default=-1)
    # `titanlab schedule --csv`, `mkdir`, `titanlab tokenize` make what later commands read.
    makes = re.compile(r"mkdir |python |titanlab (tokenize|schedule .*--csv|train|resume|generate|export)\b")
    return [text for text in own[: last + 1] if makes.match(text) and not re.search("--cfg|--help", text)]


def shortened(text: str) -> str:
    if not text.startswith("titanlab train"):
        return text
    # Profilers and trackers are not part of a run's identity: without another name, the run would be done already.
    recorder = re.search(r"(profiler|tracker)=\[?([\w,]+)", text)
    name = f"name={recorder[2].replace(',', '_')}" if recorder else ""
    # A profiler records later steps.
    steps = "training.steps=9" if "profiler=" in text else ""
    # The schedule of the file on the page has four microbatches.
    batch = "training.global_batch=4" if "schedule=csv" in text else ""
    return " ".join([text, SHORT, steps, batch, name])


executed_before: set[str] = set()


@pytest.mark.full
@pytest.mark.parametrize("page", [page for page in [*PAGES, *DECISIONS] if to_execute(page)])
def test_commands_of_a_page_train_at_reduced_size(page, tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    texts = to_execute(page)
    trains = [text for text in texts if text.startswith("titanlab train")]
    if not any("+recipe=quickstart" in text for text in trains) and any(" quickstart" in text for text in texts):
        texts = ["titanlab train +recipe=quickstart", *texts]
    for text in map(shortened, texts):
        # Pages that begin alike need not train the same twice.
        if text in executed_before and "quickstart" not in text:
            continue
        executed_before.add(text)
        done = subprocess.run(
            ["bash", "-c", text], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{page}: {text}\n{done.stdout}{done.stderr}"
        if text.startswith("titanlab train"):
            assert re.search(r"^done: all steps are done$", done.stdout, re.MULTILINE), f"{page}: {text}\n{done.stdout}"
