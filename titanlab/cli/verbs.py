"""`titanlab VERB …`: call the verb's function, and turn its errors into one line and an exit code."""

from __future__ import annotations

import argparse
import errno
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Sequence

from titanlab import __version__
from titanlab.cli.arguments import FROM, VERBS
from titanlab.errors import ConfigError, TitanlabError
from titanlab.records import OutcomeKind
from titanlab.system import (
    discard,
    disk_fault,
    error_line,
    has_no_reader,
    kept_imports,
    lost_output,
    open_closed_streams,
    replace_unwritable,
)

# Errors of the system for paths that the user gave; pathlib raises these even for `exists()`.
_PATHS = {
    errno.ENAMETOOLONG: "check the path or the name that you gave",
    errno.EACCES: "ask its owner for permission, or name another path",
}
_TRAINING = (["train"], ["sweep"], ["resume"], ["retry"])
# Verbs that remove incomplete files or end a process when they are interrupted: SIGTERM interrupts them too.
_CLEANS_UP = ("tokenize", "sync", "import", "export", "download-tokenizer")
# Flags with which a verb only prints.
_PRINTS = frozenset({"-h", "--help", "--hydra-help", "-c", "--cfg", "-i", "--info", "-n", "--dry-run"})

_HELP = """\
titanlab: compose, run, prove and compare LLM training recipes

usage: titanlab VERB [ARGUMENT …]

{verbs}

titanlab train --help        Hydra's groups and flags (--cfg job --resolve, -m, --info …)
titanlab VERB --help         what a verb takes
titanlab --version"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Returns the process's exit code: 0 for success, 2 for bad input, else the outcome's code."""
    open_closed_streams()
    replace_unwritable(sys.stdout)
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = call(words)
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
        # argparse raises SystemExit after `--help`.
        code = int(end.code or 0)
    return _with_output(code, words)


def _with_output(code: int, words: Sequence[str]) -> int:
    """Write the rest of the output. Returns the exit code; 1 if the disk is full and the verb succeeded.

    A verb that trains or submits keeps its exit code: its output is only messages.
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
    """Whether a command line asks to train or submit, and not only to print."""
    return words[:1] in _TRAINING and not _PRINTS.intersection(word.partition("=")[0] for word in words)


def call(words: Sequence[str]) -> int:
    """Run one verb. Returns its exit code.

    Raises:
        TitanlabError: bad input, or a failure that one line can explain.
    """
    if not words or words[0] in ("-h", "--help", "help"):
        width = max(map(len, VERBS))
        verbs = "\n".join(f"  {name:<{width}}  {verb.about}" for name, verb in VERBS.items())
        print(_HELP.format(verbs=verbs))
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
    if verb == "train" and not any(word.partition("=")[0] == FROM for word in rest):
        args = argparse.Namespace(run=None, rest=rest)
    else:
        args = VERBS[verb].parser(verb).parse_args(rest)
    verb_main = main_of(verb)
    if verb not in _CLEANS_UP or threading.current_thread() is not threading.main_thread():
        return verb_main(args)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return verb_main(args)
    finally:
        signal.signal(signal.SIGTERM, before)


def main_of(verb: str) -> Callable[[argparse.Namespace], int]:
    with kept_imports():
        module = importlib.import_module(f"titanlab.cli.{VERBS[verb].module}")
    verb_main: Callable[[argparse.Namespace], int] = getattr(module, f"{verb.replace('-', '_')}_verb")
    return verb_main
