"""`titanlab VERB …`: call the verb's function, and turn its errors into one line and an exit code."""

from __future__ import annotations

import errno
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from titanlab import __version__
from titanlab.errors import ConfigError, TitanlabError
from titanlab.records.outcome import OutcomeKind
from titanlab.system.files import disk_fault
from titanlab.system.imports import kept_imports
from titanlab.system.terminal import (
    discard,
    error_line,
    has_no_reader,
    lost_output,
    open_closed_streams,
    replace_unwritable,
)

# verb → (module, help text). The module is imported when the verb is called; its function is named VERB_verb.
VERBS = {
    "train": ("titanlab.cli.train", "run a recipe: titanlab train +recipe=quickstart training.steps=50"),
    "sweep": ("titanlab.cli.sweep", "run many: titanlab sweep +sweeps=quickstart_layouts --dry-run"),
    "plan": (
        "titanlab.cli.plan",
        "rank layouts by estimates: titanlab plan +recipe=llama3_1_8b_8gpus cluster=h100",
    ),
    "parity": (
        "titanlab.cli.parity",
        "prove that recipes train the same: titanlab parity +sweeps=quickstart_layouts",
    ),
    "rehearse": (
        "titanlab.cli.rehearse",
        "find what would break on the cluster: titanlab rehearse +sweeps=llama3_405b_512gpus",
    ),
    "status": ("titanlab.cli.status", "show where the runs of a sweep stand, and why those that failed did"),
    "logs": ("titanlab.cli.inspect_runs", "print what the ranks of a run have printed, by time; --follow goes on"),
    "diagnose": (
        "titanlab.cli.inspect_runs",
        "say again why a run hung: which rank, in which collective, on which line",
    ),
    "cancel": ("titanlab.cli.status", "end a sweep's jobs, or some of them; what is done stays done"),
    "retry": ("titanlab.cli.resume", "submit runs again that ended badly (--outcome oom) or by other code (--stale)"),
    "collect": ("titanlab.cli.results", "write a sweep's results as one parquet and one CSV file"),
    "best": (
        "titanlab.cli.results",
        "name a sweep's best recipe by speed, MFU or memory, if the gap is more than noise",
    ),
    "report": (
        "titanlab.cli.results",
        "write a sweep's report: one HTML file with the answer, figures and causes",
    ),
    "resume": ("titanlab.cli.resume", "continue a run that was stopped, under the same or another layout"),
    "checkpoints": ("titanlab.cli.inspect_runs", "list a run's checkpoints; --verify reads and checks every byte"),
    "hosts": (
        "titanlab.cli.inspect_runs",
        "list hosts on which a run failed, and which its later jobs leave out; --clear HOST",
    ),
    "sync": (
        "titanlab.cli.trackers",
        "upload what wandb has written offline; --rebuild writes it anew from metrics.jsonl",
    ),
    "workspace": (
        "titanlab.cli.trackers",
        "make a wandb workspace and report of a sweep; without an API key, print them as JSON",
    ),
    "generate": ("titanlab.cli.weights", "write text with a run's latest checkpoint"),
    "schedule": ("titanlab.cli.schedule", "draw a pipeline's schedule; `all` compares them: bubble, microbatches kept"),
    "tokenize": ("titanlab.cli.tokens", "make memory-mapped token shards of text, JSONL or parquet files"),
    "download-tokenizer": (
        "titanlab.cli.tokens",
        "fetch a model's tokenizer from Hugging Face's hub",
    ),
    "import": (
        "titanlab.cli.weights",
        "convert weights of Hugging Face or of DCP, for train init_from=…",
    ),
    "export": ("titanlab.cli.weights", "write a run's weights as a folder that transformers opens"),
    "clean": (
        "titanlab.cli.status",
        "remove old checkpoints, superseded runs, caches: shows sizes, and asks",
    ),
    "repro": (
        "titanlab.cli.environment",
        "restore a run's code and config in a git worktree; what differs from now",
    ),
    "doctor": (
        "titanlab.cli.environment",
        "check this machine: torch, GPUs, Slurm, disk, limits; each line ok, warn or fail",
    ),
    "completion": (
        "titanlab.cli.completion",
        'print the shell\'s completion script: eval "$(titanlab completion bash)"',
    ),
}

# Paths that a person has given; pathlib raises these when it only asks whether something is there.
_PATHS = {
    errno.ENAMETOOLONG: "check the path or the name that you gave",
    errno.EACCES: "ask its owner for permission, or name another path",
}
_TRAINING = (["train"], ["sweep"], ["resume"], ["retry"])
# Verbs that remove what is half made, or end a process, when they are interrupted: SIGTERM does so as well.
_CLEANS_UP = ("tokenize", "sync", "import", "export", "download-tokenizer")
# Flags with which they only print.
_PRINTS = frozenset({"-h", "--help", "--hydra-help", "-c", "--cfg", "-i", "--info", "-n", "--dry-run"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Returns the process's exit code: 0 for success, 2 for bad input, else the outcome's code."""
    open_closed_streams()
    replace_unwritable(sys.stdout)
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _call(words)
        sys.stdout.flush()
    except TitanlabError as error:
        error_line(str(error))
        code = error.exit_code
    except BrokenPipeError:
        if not has_no_reader(sys.stdout):
            raise
        code = 0
    except OSError as error:
        if error.errno in _PATHS and isinstance(error.filename, str):
            rule = f"cannot be used ({error.strerror})"
            refusal = ConfigError("path", error.filename, rule, _PATHS[error.errno])
            error_line(str(refusal))
            code = refusal.exit_code
        elif (fault := disk_fault(error, ends_run=_trains(words))) is not None:
            error_line(fault)
            code = OutcomeKind.CRASH.exit_code
        else:
            raise
    except KeyboardInterrupt:
        # No rank has started yet; after the start, the ranks handle Ctrl-C.
        error_line("interrupted" if words[0] in _CLEANS_UP else "interrupted; nothing was started")
        code = OutcomeKind.CANCELLED.exit_code
    except SystemExit as end:
        # argparse raises it after `--help`.
        code = int(end.code or 0)
    return _with_output(code, words)


def _with_output(code: int, words: Sequence[str]) -> int:
    """Write what is left of the output. Returns the exit code; 1 if the disk did not take all output of a success.

    Where a verb trains or submits, its output is only messages: the exit code is that of what it did.
    """
    error = lost_output()
    try:
        sys.stdout.flush()
    except OSError as late:
        error = error or late
        discard(sys.stdout)
    fault = None if error is None else disk_fault(error, ends_run=False)
    if code or fault is None or _trains(words):
        return code
    error_line(fault)
    return OutcomeKind.CRASH.exit_code


def _trains(words: Sequence[str]) -> bool:
    """Whether a command line trains or submits, or would."""
    return words[:1] in _TRAINING and not _PRINTS.intersection(word.partition("=")[0] for word in words)


def _call(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"titanlab {__version__}")
        return 0
    verb, rest = words[0], words[1:]
    if verb not in VERBS:
        # Imported here: it takes time, and verbs are seldom misspelled.
        import difflib

        near = difflib.get_close_matches(verb, VERBS, n=1)
        cure = "".join(f"try {known}; " for known in near) + f"known: {', '.join(VERBS)}"
        raise ConfigError("verb", verb, "there is no such verb", cure)
    verb_main = main_of(verb)
    if verb in _CLEANS_UP and threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            return verb_main(rest)
        finally:
            signal.signal(signal.SIGTERM, before)
    return verb_main(rest)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main_of(verb: str) -> Callable[[Sequence[str]], int]:
    """The function of a verb, whose module is imported for it."""
    with kept_imports():
        module = importlib.import_module(VERBS[verb][0])
    verb_main: Callable[[Sequence[str]], int] = getattr(module, f"{verb.replace('-', '_')}_verb")
    return verb_main


def _help() -> str:
    width = max(map(len, VERBS))
    lines = [
        "titanlab: compose, run, prove and compare LLM training recipes",
        "",
        "usage: titanlab VERB [ARGUMENT …]",
        "",
    ]
    lines += [f"  {verb:<{width}}  {text}" for verb, (_, text) in VERBS.items()]
    lines += [
        "",
        "titanlab train --help        Hydra's groups and flags (--cfg job --resolve, -m, --info …)",
        "titanlab VERB --help         what a verb takes",
        "titanlab --version",
    ]
    return "\n".join(lines)
