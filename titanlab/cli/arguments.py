"""Declares the flags and the help of every verb. The module of a verb is imported only to run the verb."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from titanlab.errors import ConfigError
from titanlab.ranges import MOST_64_BITS, check_whole
from titanlab.system import finite, user_path

_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}}
_UNITS |= {f"{p}IB": 1024**n for n, p in enumerate("KMGT", 1)}
_MOST_BYTES = 2.0**63  # file systems have signed 64-bit sizes
FROM = "--from"
# Default steps of each training of `titanlab parity`, and the most steps that --steps may ask for.
PARITY_STEPS, MOST_STEPS = 3, 100
RUN = "the run's folder, name, or the first digits of its hash"
SWEEP = "the sweep's name, or its folder"
FLAG = {"action": "store_true"}
_TOKEN = "of the hub, for gated models (default: HF_TOKEN, or what `hf auth login` kept)"


class Arguments(argparse.ArgumentParser):
    """The parser of a verb: options and positional arguments in any order; every mistake is a ConfigError.

    With `usage`, the verb takes a recipe: words that are not flags of the verb go into `rest`, for Hydra.
    """

    def __init__(self, verb: str, description: str, usage: str | None = None) -> None:
        super().__init__(prog=f"titanlab {verb}", description=description, usage=usage, allow_abbrev=False)
        if usage is not None:
            # Keep the line breaks: the help of a verb that takes a recipe has aligned examples.
            self.formatter_class = argparse.RawDescriptionHelpFormatter
        self.takes_recipe = usage is not None
        self._command_line = ""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._command_line = " ".join(args or [])
        if not self.takes_recipe:
            return self.parse_intermixed_args(args, namespace)
        parsed, parsed.rest = self.parse_known_args(args, namespace)
        return parsed

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        name = action.option_strings[0] if action.option_strings else action.dest
        if action.type in (Path, user_path) and not arg_string.strip():
            # An empty path would mean the current folder, which no user wants.
            raise ConfigError(name, arg_string, "names no file or folder", f"see `{self.prog} --help`")
        value = super()._get_value(action, arg_string)
        if isinstance(value, int):
            check_whole(name, value, MOST_64_BITS, cure=f"see `{self.prog} --help`")
        return value

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError; argparse calls this for every mistake."""
        wrong = re.fullmatch(r"argument (\S+): invalid (int|float) value: '(.*)'", message, re.DOTALL)
        if wrong is not None:
            kind = "a whole number" if wrong[2] == "int" else "a number"
            raise ConfigError(wrong[1], wrong[3], f"must be {kind}", f"see `{self.prog} --help`")
        raise ConfigError("arguments", self._command_line, message, f"see `{self.prog} --help`")

    def print_help(self, file: Any = None) -> None:
        """Print the help. Unlike argparse's own method, this raises an error if the disk is full."""
        print(self.format_help(), end="", file=file)


def bytes_of(text: str, key: str) -> int:
    """The number of bytes in a text such as `5GB`, `500 MiB` or `1e9`; a ConfigError if it is not a size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or not 1 <= float(match[1]) * unit < _MOST_BYTES:
        raise ConfigError(key, text, "is not a file size", "try 5GB")
    return int(float(match[1]) * unit)


def check_number(key: str, value: int, most: int, usual: int) -> None:
    if not 1 <= value <= most:
        raise ConfigError(key, value, f"must lie in 1 to {most}", f"try {usual}")


def json_text(value: Any) -> str:
    """The JSON that a verb prints; numbers that are not finite are null."""
    return json.dumps(finite(value), indent=2, ensure_ascii=False)


Add = Callable[..., argparse.Action]


class Verb(NamedTuple):
    """A verb of the command line.

    Attributes:
        module: within `titanlab.cli`; its function is named VERB_verb, and gets the parsed arguments.
        about: the verb's line in `titanlab --help`.
        declare: adds the verb's arguments to its parser; its docstring is the description, and the text that it returns
            stands below the flags.
        usage: the usage line of a verb that takes a recipe.
    """

    module: str
    about: str
    declare: Callable[[Add], str | None]
    usage: str | None
    has_runs: bool

    def parser(self, name: str) -> Arguments:
        parser = Arguments(name, inspect.cleandoc(self.declare.__doc__ or ""), self.usage)
        parser.epilog = self.declare(parser.add_argument)
        if self.has_runs:
            parser.add_argument("--runs", default="runs", help="the folder of runs (default runs)")
        return parser


VERBS: dict[str, Verb] = {}


def _verb(
    module: str, about: str, *, usage: str | None = None, has_runs: bool = True
) -> Callable[[Callable[[Add], str | None]], None]:
    def register(declare: Callable[[Add], str | None]) -> None:
        VERBS[declare.__name__.strip("_").replace("_", "-")] = Verb(module, about, declare, usage, has_runs)

    return register


@_verb("train", "run a recipe: titanlab train +recipe=quickstart training.steps=50")
def _train(add: Add) -> None:
    """Begin a new run from another run's checkpoint."""
    # Without --from, Hydra reads the command line and prints the help.
    add("overrides", nargs="*", default=[], help="key=value or group=preset: training.steps=2000")
    add(FROM, dest="run", required=True, help="the other run, or one of its checkpoints")
    add("--cfg", choices=("job",), help="print the recipe of the new run, and start nothing")


@_verb(
    "sweep",
    "run many recipes: titanlab sweep +sweeps=quickstart_layouts --dry-run",
    usage="titanlab sweep [+sweeps=NAME] [KEY=VALUE,VALUE …] [KEY=VALUE …] [FLAG …]",
    has_runs=False,
)
def _sweep(add: Add) -> str:
    """Plan many runs, submit what is missing of them, and return.

      titanlab sweep +sweeps=quickstart_layouts               a sweep's file, on this host
      titanlab sweep +sweeps=quickstart_layouts --dry-run     what it would submit, what it drops, and why
      titanlab sweep parallelism=ddp,fsdp world=2 seed=0,1    four points: every value with every other
      titanlab sweep +sweeps=ac_memory launch=slurm           jobs of Slurm, each with the nodes of its layout

    Submitting again submits what is missing. Points that cannot be run are dropped, each with its reason. An
    error in the sweep itself is reported in one line, and nothing is submitted. How to write a sweep: docs/sweeps.md.
    """
    from titanlab.recipe import conf_folder

    add("-n", "--dry-run", **FLAG, help="plan and say what would be submitted; nothing is written")
    add("--wait", **FLAG, help="follow the runs to their end; exit with the code of the first that failed")
    text = "leave out all whose estimate exceeds a device's memory (titanlab plan), not only those that exceed it by "
    add("--prune", **FLAG, help=f"{text}more than the error of estimates")
    add("--keep", **FLAG, help="leave out nothing because of its estimate")
    add("--force", **FLAG, help="do those again that have ended; their folders go to superseded/")
    add("--json", **FLAG, help="the plan as JSON")
    sweeps = sorted(path.stem for path in (conf_folder() / "sweeps").glob("*.yaml"))
    return f"""\
Hydra's own flags too: --cfg job, --info, --config-dir …, as in `titanlab train --help`

sweeps: {", ".join(sweeps)}
then: titanlab status SWEEP --watch, titanlab cancel SWEEP, titanlab retry SWEEP --all-failed, titanlab collect SWEEP"""


@_verb(
    "plan",
    "rank layouts by estimates: titanlab plan +recipe=llama3_1_8b_8gpus cluster=h100",
    usage="titanlab plan +recipe=NAME cluster=NAME [world=N] [KEY=VALUE …] [FLAG …]",
    has_runs=False,
)
def _plan(add: Add) -> None:
    """Estimate memory and speed of layouts without a GPU, and rank those that fit.

      titanlab plan +recipe=llama3_1_8b_8gpus cluster=h100 world=64             the 20 fastest layouts of 64 GPUs
      titanlab plan +recipe=llama3_1_8b_8gpus cluster=h100 world=64 --why       and why each of them has its place
      titanlab plan +recipe=llama3_1_405b_512gpus cluster=h100 --explain        the account of one recipe as it stands

    Degrees, microbatch, schedule, stages of a rank and activation checkpointing vary; world and global batch stay.
    How the figures are computed: docs/planner.md.
    """
    from titanlab.plan import MOST

    add("--top", type=int, metavar="N", help=f"how many (default 20, at most {MOST:,})")
    add("--why", **FLAG, help="one sentence for each, and how many layouts were left out for which rule")
    text = "precision and compile too, all or some: precision=bf16,mxfp8; or machines: cluster=a100_80gb,h100,h200"
    add("--vary", default="", metavar="GROUP[=NAME,…],…", help=text)
    text = "memory by rank of the pipeline, time by part, bytes of each collective, the timeline"
    add("--explain", **FLAG, help=text)
    add("--plot", type=user_path, metavar="FILE", help="with --explain: draw the timeline: timeline.svg, timeline.png")
    text = "run one step on tensors without data; exit code 1 if it is not what the planner declares"
    add("--trace", **FLAG, help=text)
    text = "with --trace: these ranks, and not the first one of each pipeline stage"
    add("--rank", default="", metavar="N,…", help=text)
    add("--json", **FLAG, help="the same as JSON, in bytes and seconds")
    text = "fit the estimates to the runs of a sweep of yours, and write a file for cluster=NAME"
    add("--calibrate", metavar="SWEEP", help=text)
    text = "measure this machine, or with launch=slurm a node, by one short job, and write such a file"
    add("--measure", **FLAG, help=text)
    text = "with --calibrate or --measure: FOLDER/cluster/NAME.yaml (default: in the sweep's folder)"
    add("--out", type=user_path, metavar="FILE", help=text)
    add("--runs", metavar="FOLDER", help="with --calibrate: the folder of runs (default runs)")


@_verb(
    "combinations",
    "say what goes with what: titanlab combinations precision=float8_rowwise parallelism=fsdp_cp",
    usage="titanlab combinations [TECHNIQUE | KEY=VALUE …] [cluster=NAME] [FLAG …]",
    has_runs=False,
)
def _combinations(add: Add) -> str:
    """Say which techniques go together, which row of the proofs has them, or which rule refuses them.

      titanlab combinations precision=float8_rowwise parallelism=fsdp_cp    do these go together
      titanlab combinations async_tp                                        what goes with one
      titanlab combinations                                                 everything with everything

    A small recipe with all of them is composed and checked by the rules of `titanlab train`; nothing is trained. The
    machine is a B200, which has every format; cluster=h100 or cluster=cpu asks for another.
    """
    add("--json", **FLAG, help="the answers as JSON")
    return "Exit codes: 0 works, 1 refused, 2 bad input. Names of techniques and the whole table: docs/combinations.md."


@_verb(
    "proofs",
    "prove that recipes train the same: titanlab parity +sweeps=quickstart_layouts",
    usage="titanlab parity [+sweeps=NAME | SWEEP | +recipe=NAME] [KEY=VALUE …] [FLAG …]\n"
    "       titanlab parity A B [FLAG …]",
)
def _parity(add: Add) -> str:
    """Prove that recipes train the same.

      titanlab parity +sweeps=quickstart_layouts                every recipe of a sweep, each compared with one process
      titanlab parity +recipe=quickstart parallelism=fsdp world=2
      titanlab parity quickstart "+recipe=quickstart parallelism=tp world=2"    two recipes of one model and data
      titanlab parity RUN RUN                                   the logged losses and norms of two finished runs

    Each recipe is reduced: few layers, small widths, random tokens; its layout, schedule, checkpointing, compiled parts
    and optimizer stay. It trains on this CPU, in fp32 and in its own precision, and is compared with one process. A
    layout of more processes is folded: every axis keeps a degree of 2. The result is kept in the sweep's folder, as
    parity.json.
    """
    from titanlab.prove import MOST_PROCESSES

    add("--steps", type=int, metavar="N", help=f"of each training (default {PARITY_STEPS}, at most {MOST_STEPS})")
    add("--processes", type=int, metavar="N", help=f"most processes of a layout (default {MOST_PROCESSES})")
    _add_choice(add)
    return "Exit codes: 0 all pass, 1 a recipe fails, 2 bad input. Tolerances and what the proof shows: docs/proofs.md."


@_verb(
    "proofs",
    "find what would break on the cluster: titanlab rehearse +sweeps=stack_405b_512gpus",
    usage="titanlab rehearse [+sweeps=NAME | SWEEP | +recipe=NAME] [KEY=VALUE …] [FLAG …]",
)
def _rehearse(add: Add) -> str:
    """Find what would break on the cluster, on this CPU.

      titanlab rehearse +sweeps=stack_405b_512gpus              every recipe of a sweep, a few steps each
      titanlab rehearse +sweeps=stack_405b_512gpus --only 1f1b
      titanlab rehearse +recipe=llama3_1_8b_256gpus_4d

    Each recipe is composed and checked in its real size, then reduced and trained for a few steps: its layout is
    folded; schedule, precision, checkpointing, compiled parts, optimizer, validation and kind of checkpoints stay. Axes
    that do not fit together get a second rehearsal. A failure does not stop the others.
    """
    from titanlab.prove import MOST_PROCESSES, STEPS

    text = f"of each rehearsal (default {STEPS}, at most {MOST_STEPS})"
    add("--steps", type=int, default=STEPS, metavar="N", help=text)
    text = f"most processes of a layout (default {MOST_PROCESSES})"
    add("--processes", type=int, default=MOST_PROCESSES, metavar="N", help=text)
    text = "keep the folders of the reduced runs there; otherwise only those of failed ones stay"
    add("--keep", type=user_path, metavar="FOLDER", help=text)
    _add_choice(add)
    return "Exit codes: 0 all are ok, 1 one failed, 2 bad input. What a rehearsal cannot find: docs/proofs.md."


def _add_choice(add: Add) -> None:
    add("--only", default="", metavar="WORD", help="recipes with this word in their names")
    add("--inductor", **FLAG, help="let inductor compile what it compiles in the recipe: minutes instead of seconds")
    add("--json", **FLAG, help="the result as JSON")


@_verb("status", "show where the runs of a sweep stand, and why those that failed did")
def _status(add: Add) -> None:
    """Show the state of a sweep's runs; without a sweep, list the sweeps."""
    add("sweep", nargs="?", help=SWEEP)
    add("run", nargs="?", help="one run of it: its folder, name, or the first digits of its hash")
    add("--watch", **FLAG, help="go on showing it until nothing runs or waits any more")
    add("--json", **FLAG, help="rows as JSON; docs/comparing.md has the columns")


@_verb("inspect_runs", "print what the ranks of a run have printed, by time; --follow goes on")
def _logs(add: Add) -> None:
    """Print what the ranks of a run have printed: of all ranks, ordered by time."""
    add("run", help=RUN)
    add("--rank", type=int, help="only this rank, by the number in its file's name")
    add("--attempt", type=int, help="only what this attempt has printed (default: all of them)")
    add("--follow", "-f", **FLAG, help="go on until the run ends; Ctrl-C stops showing, not the run")
    add("--tail", type=int, metavar="K", help="only the last K lines")
    add("--grep", metavar="PATTERN", help="only lines in which this regular expression is found")


@_verb("inspect_runs", "say again why a run hung: which rank, in which collective, on which line")
def _diagnose(add: Add) -> None:
    """Say again why a run hung, and where each of its ranks was."""
    add("run", help=RUN)
    add("--attempt", type=int, help="number of the attempt (default the newest)")
    add("--json", **FLAG, help="the same as JSON, with whole stacks")


@_verb("status", "end a sweep's jobs, or some of them; what is done stays done")
def _cancel(add: Add) -> None:
    """Cancel runs of a sweep: running ones save and end, waiting ones do not start."""
    add("sweep", help=SWEEP)
    add("run", nargs="*", help="runs by folder, label or first digits of the hash (default: all)")


@_verb("resume", "submit runs again that ended badly (--outcome oom) or by other code (--stale)")
def _retry(add: Add) -> None:
    """Put ended runs of a sweep back into the queue; they go on from their checkpoints."""
    add("sweep", help=SWEEP)
    text = "runs by folder, label or first digits of the hash (default: all); keys of launch, and cluster.nodes and "
    add(
        "runs_and_keys",
        nargs="*",
        metavar="RUN | launch.KEY=VALUE",
        default=[],
        help=f"{text}cluster.per_node, for the new jobs",
    )
    add("--outcome", default="", help="those that ended with one of these outcomes, such as hang,node_fail")
    add("--all-failed", **FLAG, help="those that ended with any outcome but done")
    add("--stale", **FLAG, help="those that ran other code than the present; they start from the beginning")
    add("--dry-run", **FLAG, help="say which they are, and submit nothing")


@_verb("status", "write a sweep's results as one parquet and one CSV file")
def _collect(add: Add) -> None:
    """Write a sweep's table as parquet and CSV: a row for each run and dropped point."""
    add("sweep", help=SWEEP)
    add("--into", type=Path, help="the folder for the files (default: the sweep's own)")


@_verb("status", "name a sweep's best recipe by speed, MFU or memory, if the gap is more than noise")
def _best(add: Add) -> None:
    """Rank the recipes of a sweep; none is named the best if the gap may be noise."""
    add("sweep", help=SWEEP)
    text = "tps: tokens per second of one device (default); mfu; memory: the least peak of a rank"
    add("--by", default="tps", help=text)
    add("--max-memory", type=float, metavar="GIB", help="leave out recipes that need more, such as 76")
    add("--json", **FLAG, help="the ranking as JSON; docs/comparing.md has the keys")


@_verb("status", "write a sweep's report: one HTML file with the answer, figures and causes")
def _report(add: Add) -> None:
    """Write a sweep's report: one HTML file, which opens without a network."""
    add("sweep", help=SWEEP)
    add("--by", choices=("tps", "mfu", "memory"), default="tps", help="what to rank by (default tps)")
    add("--into", type=Path, help="an HTML file, or a folder (default: SWEEP.html in the sweep's folder)")
    add("--figures", type=Path, help="a folder: also write each figure there, for papers")
    add("--format", choices=("png", "svg", "pdf"), help="of these figures (default png)")


@_verb("resume", "continue a run that was stopped, under the same or another layout")
def _resume(add: Add) -> None:
    """Continue a run that was stopped."""
    add("run", help=f"{RUN}; or one of its checkpoints")
    add("overrides", nargs="*", default=[], help="key=value, such as parallelism.shard=4")
    add("--step", type=int, help="of the checkpoint to resume from (default: the newest)")


@_verb("inspect_runs", "list a run's checkpoints; --verify reads and checks every byte")
def _checkpoints(add: Add) -> None:
    """List a run's checkpoints, by step."""
    add("run", help=RUN)
    add("--verify", **FLAG, help="read every byte, and exit with 1 if one is damaged")
    add("--json", **FLAG, help="rows as JSON")


@_verb("inspect_runs", "list hosts on which a run failed, and which its later jobs leave out; --clear HOST")
def _hosts(add: Add) -> None:
    """List hosts on which a run failed; later jobs of that run leave them out."""
    add("--clear", metavar="HOST", help="forget the failures on this host")
    add("--all", **FLAG, help="forget the failures on all hosts")


@_verb("trackers", "upload what wandb has written offline; --rebuild writes it anew from metrics.jsonl")
def _sync(add: Add) -> None:
    """Upload what wandb has written offline: to the project, and under the id, of the run."""
    add("runs_and_sweeps", nargs="+", metavar="RUN | SWEEP", help="runs by folder, name or hash, or whole sweeps")
    text = "first write the tracker's files of a run again, from metrics.jsonl; of a sweep, only for runs "
    add("--rebuild", **FLAG, help=f"{text}whose files are incomplete")
    text = "first write this tracker's files from metrics.jsonl, for runs that have none"
    add("--tracker", choices=("wandb", "tensorboard"), help=text)


@_verb("trackers", "make a wandb workspace and report of a sweep; without an API key, print them as JSON")
def _workspace(add: Add) -> None:
    """Make a wandb workspace and a wandb report of a sweep's runs."""
    add("sweep", help=SWEEP)
    add("--project", help="wandb's project (default: that of the runs)")
    add("--entity", help="user or team (default: that of the runs, or of the account)")
    add("--json", **FLAG, help="print them, as wandb's server takes them, and save nothing")


@_verb("weights", "write text with a run's latest checkpoint")
def _generate(add: Add) -> None:
    """Write text with a run's latest checkpoint, or with weights of a folder."""
    add("run", help=f"{RUN}; or a folder of weights")
    add("--prompt", default="", help="what the text begins with")
    add("--tokens", type=int, default=200, help="tokens at most (default 200)")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest token (default 0.8)")
    add("--top-k", type=int, default=50, help="among this many likeliest; 0: all (default 50)")
    add("--seed", type=int, default=0, help="of the sampling (default 0)")
    add("--device", default="cpu", help="cpu or cuda (default cpu)")


@_verb("schedule", "draw a pipeline's schedule; `all` compares them: bubble, microbatches kept", has_runs=False)
def _schedule(add: Add) -> None:
    """Show the timeline of a pipeline's schedule: idle time, and activations kept."""
    from titanlab.options import discover

    add("kind", help=f"{', '.join(sorted(map(str, discover()['schedule'])))}; all: compare them")
    add("--ranks", type=int, help="of the pipeline (default 4)")
    add("--microbatches", type=int, help="of a step (default 8)")
    add("--stages-per-rank", type=int, help="for schedules with a choice (default 2)")
    add("--file", help="of the schedule csv; its ranks and microbatches are the defaults")
    whole = ", one microbatch, all layers of a rank"
    add("--forward", type=float, help=f"time of a forward pass (F){whole} (default 1)")
    add("--backward", type=float, help=f"time of a whole backward pass (B){whole} (default 2)")
    add("--input", type=float, help=f"time of a gradient of the input (I){whole} (default half of B)")
    add("--weight", type=float, help=f"time of a gradient of the weights (W){whole} (default half of B)")
    add("--transfer", type=float, help="time of a transfer from rank to rank, beside computation (default 0)")
    add("--plot", type=user_path, help="draw it: timeline.svg, timeline.png")
    add("--csv", type=user_path, help="write the order, for schedule=csv schedule.file=…")


@_verb("tokens", "make memory-mapped token shards of text, JSONL or parquet files", has_runs=False)
def _tokenize(add: Add) -> None:
    """Make memory-mapped token shards of text, JSONL or parquet files."""
    add("files", help="a glob, quoted: 'corpus/**/*.jsonl'")
    add("folder", type=user_path, help="where the shards go")
    add("--tokenizer", help="a SentencePiece .model or a tokenizer.json (default: one is trained)")
    add("--vocab-size", type=int, help="of a tokenizer that is trained (default 32768)")
    add("--text-field", default="text", help="of JSONL and parquet (default text)")
    add("--validation-fraction", type=float, default=0.01, help="share of documents held out (default 0.01)")


@_verb("tokens", "fetch a model's tokenizer from Hugging Face's hub", has_runs=False)
def _download_tokenizer(add: Add) -> None:
    """Fetch a model's tokenizer from the Hugging Face hub."""
    add("repo", help="the model, such as meta-llama/Llama-3.1-8B")
    add("--folder", type=user_path, default=Path("tokenizers"), help="where to (default tokenizers/)")
    add("--token", help=_TOKEN)


@_verb("weights", "convert weights of Hugging Face or of DCP, for train init_from=…", has_runs=False)
def _import(add: Add) -> None:
    """Convert weights of Hugging Face or of torch.distributed.checkpoint, for init_from."""
    text = "a folder with config.json and safetensors, a model of the hub (owner/name), or a folder with .metadata"
    add("source", help=text)
    add("overrides", nargs="*", metavar="model.KEY=VALUE", help="sizes of the model of a folder with .metadata")
    add("--model", help="of a folder with .metadata, which has no config: the model's option")
    add("--into", type=user_path, help="the folder to make (default weights/NAME)")
    add("--name", help="of the model's option, model=NAME (default: from the source's name)")
    add("--revision", help="branch, tag or commit of a model of the hub")
    add("--token", help=_TOKEN)
    add("--shard-size", default="5GB", help="most bytes of a file (default 5GB)")
    add("--force", **FLAG, help="replace weights that are there")


@_verb("convert", "a job config of torchtitan as a command line or a recipe", has_runs=False)
def _convert(add: Add) -> None:
    """Write a job config of torchtitan as a command line or a recipe, and name what has no counterpart."""
    add("file", type=user_path, help="FILE.toml")
    add("--world", type=int, metavar="N", help="number of processes, which torchrun says there")
    add("--model", metavar="OPTION", help="titanlab's model, in place of the file's model.name and model.flavor")
    add("--into", type=user_path, metavar="FILE", help="write a recipe, FOLDER/recipe/NAME.yaml, for +recipe=NAME")
    add("--force", **FLAG, help="replace a recipe that is there")


@_verb("weights", "write a run's weights as a folder that transformers opens")
def _export(add: Add) -> None:
    """Write a run's weights, or an imported folder's, for transformers or for init_from."""
    from titanlab.train import DTYPES

    add("run", help="a run's folder, name or hash, one of its checkpoints, or an imported folder")
    add("--into", type=user_path, required=True, help="the folder to make")
    add("--format", default="hf", help="hf, titanlab or dcp (default hf)")
    add("--names", default="titanlab", help="of parameters in dcp: titanlab (prefix model.) or torchtitan (no prefix)")
    add("--dtype", help=f"{', '.join(DTYPES.values())} (default: as saved)")
    add("--step", type=int, help="of the checkpoint (default: the latest)")
    add("--shard-size", help="most bytes of a file (default 5GB)")
    add("--name", help="of the model's option, for --format titanlab (default: from --into)")
    add("--force", **FLAG, help="replace weights that are there")


@_verb("status", "remove old checkpoints and superseded runs: shows sizes, and asks")
def _clean(add: Add) -> None:
    """Remove what no run needs any more; results, logs and records always stay."""
    from titanlab.sweep import KINDS

    add("name", nargs="?", metavar="RUN | SWEEP", help="one run or one sweep (default: all of them)")
    text = f"some of {', '.join(KINDS)}; or all (the default)"
    add("--what", default="all", help=text)
    add("--keep", type=int, metavar="N", help="keep N checkpoints of each run (default: as its recipe)")
    add("--verify", **FLAG, help="read every byte of checkpoints that stay, to be sure")
    add("--dry-run", **FLAG, help="only show it, with every path")
    add("--yes", **FLAG, help="do not ask")


@_verb("environment", "restore a run's code and config in a git worktree; what differs from now")
def _repro(add: Add) -> None:
    """Restore what a run was made with: code, config, and what differs from now."""
    add("run", help=RUN)
    add("--into", type=Path, help="the folder to make (default repro-RUN)")
    add("--attempt", type=int, help="of the run (default the newest)")
    add("--repo", type=user_path, help="a git repository that has the commit (default: titanlab's own)")
    add("--dry-run", **FLAG, help="only say what differs, and make no folder")


@_verb("environment", "check this machine: torch, GPUs, Slurm, disk, limits; each line ok, warn or fail")
def _doctor(add: Add) -> None:
    """Check this machine; nothing is trained, and no job is submitted."""
    add("overrides", nargs="*", default=[], help="key=value of launch, such as launch=slurm launch.partition=gpu")
    add("--json", **FLAG, help="the findings as JSON")
    add("--config-dir", metavar="FOLDER", help="with your site's launch/NAME.yaml")


@_verb("completion", 'print the shell\'s completion script: eval "$(titanlab completion bash)"', has_runs=False)
def _completion(add: Add) -> None:
    """Print a shell's completion script, for eval "$(titanlab completion bash)"."""
    add("shell", nargs="*", default=[], help="bash (default); zsh too, after bashcompinit")
