"""What the command line imports: nothing that takes long, until there is something to do with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.test_layers import HEAVY

# What is typed and its exit code, in an order in which each adds little to what was imported before it.
CALLS = [
    ("--version", 0),
    ("completion bash", 0),
    ("generate nope", 2),
    ("resume nope", 2),
    ("tokenize nothing out", 2),
    ("schedule all", 0),
    ("schedule csv --file nope.csv", 2),
    ("train --nope", 2),
    ("train training.stepz=3", 2),
    ("train training.steps=abc", 2),
    ("train model.heads=3", 2),
    ("train parallelism=fsdp world=3", 2),
    ("train -m data=synthetic seed=0,-1", 2),
    ("train data=hf data.path=json", 2),
    ("train tracker=wandb tracker.mode=on", 2),
    ("train --cfg job --resolve +recipe=quickstart", 0),
    ("train --info searchpath", 0),
    ("train --help", 0),
    ("sweep --help", 0),
    ("sweep +sweeps=quickstart_layouts --dry-run", 0),
    ("sweep +sweeps=quickstart_layouts --cfg job", 0),
    ("sweep +sweeps=nope", 2),
    ("status nope", 2),
    ("cancel nope", 2),
    ("retry nope --outcome oom", 2),
    ("collect nope", 2),
    ("report nope", 2),
    ("report --help", 0),
    ("completion query", 0),
]
# Prints, for every call, its exit code and the heavy modules that there are after it.
REPORT = """
import json, os, sys
from titanlab.cli import main
calls, heavy = json.load(sys.stdin)
out, sys.stdout = sys.stdout, open(os.devnull, "w")
sys.stderr = sys.stdout
found = []
for call in calls:
    code = main(call.split())
    found.append([call, code, sorted(set(heavy) & set(sys.modules))])
json.dump(found, out)
out.flush()
"""


def modules_after(code: str, **given) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, **given
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_nothing_heavy_is_imported_by_help_and_errors(tmp_path):
    calls = json.dumps([[call for call, _ in CALLS], sorted(HEAVY)])
    environ = {**os.environ, "COMP_LINE": "titanlab train model="}
    found = json.loads(modules_after(REPORT, input=calls, env=environ, cwd=tmp_path))
    assert found == [[call, code, []] for call, code in CALLS]
    assert list(tmp_path.iterdir()) == []


def test_the_help_needs_no_hydra(tmp_path):
    code = "import sys; from titanlab.cli import main; main(['--help']); print('loaded', *sys.modules)"
    loaded = modules_after(code, cwd=tmp_path).rpartition("loaded")[2].split()
    assert "titanlab.cli.verbs" in loaded
    assert {"hydra", "omegaconf", "yaml", "rich", "numpy", *HEAVY} & set(loaded) == set()


def test_a_single_run_imports_nothing_of_sweeps_and_is_composed_without_what_starts_it(tmp_path):
    code = """
import sys
from titanlab.cli import main
main(["train", "--cfg", "job"])
assert main(["train", "training.steps=0"]) == 2
print("loaded", *sys.modules)
import titanlab.launch.execute as execute
from titanlab.records.outcome import Outcome, OutcomeKind
execute.prepare = lambda recipes, report: recipes
execute.execute = lambda ready, console: Outcome(kind=OutcomeKind.DONE)
assert main(["train", "data=synthetic"]) == 0
print("loaded", *sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    _, mistake, run = done.stdout.split("loaded")
    assert "titanlab.recipe.compose" in mistake.split()
    assert "titanlab.launch.execute" not in mistake.split()
    assert "titanlab.launch.execute" in run.split()
    # The package itself is looked into for options; it is empty.
    assert [name for name in run.split() if name.startswith("titanlab.sweep.")] == []
    # The command starts the ranks; only they need what takes long to import.
    assert {"numpy", "torch"} & set(run.split()) == set()


def test_a_command_whose_streams_are_closed_ends_as_with_open_ones(tmp_path):
    command = '"$0" -m titanlab train training.steps=abc >&-'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: training.steps=abc: ")
