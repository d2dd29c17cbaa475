"""What stands in a block of a page and is not executed at reduced size, each with its reason: this is the one list of it.

All other commands are executed: those that train by tests/docs/test_executed.py, all others by tests/docs/test_commands.py,
which also types those that are listed here and checks them as before a start.
"""

from __future__ import annotations

import re

from tests.docs.pages import Block

# Commands, by a pattern of their text. The first that fits counts.
COMMANDS: tuple[tuple[str, str], ...] = (
    (r"make test$", "it is what runs this test"),
    (r"make quickstart TORCH_INSTALL_ARGS", "a placeholder: the reader puts an address in; the target is executed"),
    (
        r"make quickstart$",
        "four minutes: tests/test_quickstart.py trains it, tests/notebooks runs a short form of its sweep",
    ),
    (r"make environment$", "it installs packages; .ci/run begins with it"),
    (r"\. \.venv/bin/activate$", "it changes the reader's shell, and nothing else"),
    (r".*jupyter lab ", "it opens a browser; tests/notebooks executes each notebook"),
    (r"jupytext --sync", "it would write to the repository; tests/notebooks compares both files"),
    (r"launch/dev-slurm|eval \"\$\(launch/dev-slurm|sacct$", "they start a Slurm; tests/slurm does so"),
    (r"python -m venv ~/torch-2.11|~/torch-2.11/", "they install an older torch"),
    (
        r"(OUT=\S+ )?\./benchmarks/gpu_session\.sh",
        "it needs a GPU; tests/benchmarks/test_gpu_session_rehearsal.py runs it on a CPU",
    ),
    (r"python -m pip wheel", "it needs a network"),
    (r"python benchmarks/gpu_attention", "it needs a GPU; tests/benchmarks rehearses it on a CPU"),
    (r"python benchmarks/layout_guide", "minutes; tests/benchmarks runs it in a short form"),
    (r"(titanlab|torchrun) .*\+recipe=\w+gpus\b(?!_cpu)(?!.*--cfg)(?!.*(plan|cluster=h100 --))", "it needs GPUs"),
    (r"torchrun --nproc-per-node 8", "eight processes; tests/gpt/test_gpt_package.py starts four"),
    (r"torchrun .*prove.py|keys=", "tests/gpt/test_gpt_package.py runs them with the package of the page"),
    (r"titanlab train .*\+recipe=\w+_cpu", "16 processes; tests/recipe/test_recipes.py trains the twins"),
    (r"titanlab train .*world=2 .*compile=block", "a minute of compilation; tests/prove trains such combinations"),
    (r"titanlab train .*world=(4|8|16)", "many processes; tests/prove trains these axes with as many"),
    (
        r"titanlab (train|sweep|resume|retry) .*(launch=|--config-dir ~)",
        "it submits; tests/slurm and tests/launch do so",
    ),
    (
        r"titanlab sweep .*--wait|titanlab sweep (?!.*--dry-run)",
        "minutes; tests/notebooks and tests/sweep run sweeps",
    ),
    (
        r"titanlab train .*init_from=",
        "weights are imported first; tests/weights/huggingface/test_runs.py trains from them",
    ),
    (r"titanlab train model=llama3_2_1b ", "1.2 billion parameters; the same with a small model is executed"),
    (r"titanlab train .*tracker=\S+ tracker\.", "the same trackers with other keys; those without are executed"),
    (r"titanlab (parity|rehearse) ", "they train many recipes; tests/cli/proofs runs them in a short form"),
    (
        r"titanlab train --from RUN",
        "tests/training/test_saves.py and tests/cli/test_train_from.py start runs from checkpoints",
    ),
    (r"titanlab (resume|retry) (RUN|SWEEP|quickstart_layouts) ?", "tests/sweep has runs that ended in each way"),
    (r"titanlab export runs/single/small|titanlab import small-hf", "tests/weights/huggingface goes both ways"),
    (
        r"titanlab download-tokenizer",
        "it needs a network and a token; tests/data/test_download.py has a hub of its own",
    ),
    (r"titanlab sync", "it uploads; tests/cli/test_sync.py and tests/tracker/test_wandb.py have a server of their own"),
    (r"titanlab plan --(measure|calibrate)", "minutes; tests/cli/test_calibrate.py does it"),
    (r"titanlab sweep \+sweeps=mine", "tests/cli/test_sweep.py writes the file and holds the output to the page"),
)
# Blocks of pages whose files and commands other tests take from the page and run.
PAGES = {
    "docs/extending.md": "tests/extending/test_extending.py",
    "docs/models-of-your-own.md": "tests/gpt/test_gpt_package.py",
}
# Blocks of Python that tests/docs/test_examples.py runs.
PYTHON = {
    "CONTRIBUTING.md": 1,
    "docs/activation-checkpointing.md": 1,
    "docs/comparing.md": 1,
    "docs/notebooks.md": 2,
    "docs/reports.md": 1,
    "docs/run-folder.md": 3,
}
# Blocks that are no commands: the page, the begin of their text, and what they are.
OTHERS: tuple[tuple[str, str, str], ...] = (
    ("README.md", "titanlab · quickstart", "printed; tests/docs/test_numbers.py compares its numbers"),
    ("docs/checkpoints.md", "checkpoints/", "a list of files; tests/checkpoint holds it"),
    (
        "docs/comparing.md",
        "equal2: No winner",
        "printed for a real sweep of equal recipes; tests/cli/test_best.py",
    ),
    ("docs/compile.md", "warning: step 3", "printed where a shape changes; tests/compile/test_watch.py"),
    ("docs/configuration.md", "mypackage/", "an outline of a package"),
    ("docs/configuration.md", "[project", "of that package; docs/extending.md has a whole one"),
    ("docs/clusters.md", "# ~/titanlab/", "written and used by tests/docs/test_commands.py"),
    ("docs/my-slurm-cluster.md", "# ~/titanlab/", "written and used by tests/docs/test_commands.py"),
    ("docs/clusters.md", "[project", "entry points of a site's package; tests/test_options.py has one"),
    ("docs/data.md", '{\n  "format"', "used by tests/docs/given.py"),
    ("docs/data.md", "{", "used by tests/docs/given.py"),
    ("docs/hugging-face.md", "step 1/3", "printed by a run"),
    ("docs/hugging-face.md", "weights/small_hf/", "a list of files; tests/weights/huggingface"),
    ("docs/parallelism.md", "sent per step", "printed by a run"),
    ("docs/planner.md", "1.24B parameters on 31", "printed where nothing fits"),
    ("docs/planner.md", "cpu_calibration:", "printed after the calibration of a machine"),
    ("docs/planner.md", "…", "printed after the measurement of a machine"),
    ("docs/profiling.md", "steps 6 to 8", "printed by a run"),
    ("docs/profiling.md", "memory up to step 8", "printed by a run"),
    ("docs/profiling.md", "cause   RuntimeError", "printed of a run without memory"),
    ("docs/reports.md", "dp_r2 is the fastest", "printed for a real sweep; tests/cli/test_report.py"),
    ("docs/run-folder.md", "runs/", "a list of files"),
    ("docs/schedules.md", "0F0,0F1", "a file; tests/docs/test_examples.py reads it"),
    ("docs/sweeps.md", "# @package _global_", "tests/cli/test_sweep.py plans it"),
)


def reason_for_command(text: str) -> str | None:
    """Why a command is not executed at reduced size; None: it is executed."""
    return next((reason for pattern, reason in COMMANDS if re.match(pattern, text)), None)


def reason_for_block(page: str, block: Block) -> str | None:
    """Why a block without commands is not executed; None: there is no reason."""
    if page in PAGES:
        return PAGES[page]
    if block.language == "text":
        return "a text that is printed"
    fitting = (what for name, begin, what in OTHERS if name == page and block.text.startswith(begin))
    return next(fitting, None)
