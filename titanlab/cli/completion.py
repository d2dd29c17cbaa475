"""`titanlab completion bash`: a script that completes verbs, groups, options, keys, sweeps and runs."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from titanlab.cli.arguments import Arguments, parser_of
from titanlab.cli.hydra_answers import answer
from titanlab.cli.verbs import VERBS
from titanlab.errors import ConfigError
from titanlab.recipe.composition.flags import read_flags
from titanlab.records.outcome import OutcomeKind
from titanlab.records.run_folder import RunFolder
from titanlab.records.run_search import list_runs
from titanlab.sweep.sweep_folder import open_sweep

# The program is asked as it was typed, so that it need not be on PATH. An equals sign must not begin a
# new word, or `model=` could not be completed. What is whole ends with a space, a group or a key does not.
_BASH = """\
_titanlab() {
    local current="${COMP_WORDS[COMP_CWORD]}"
    local line="${COMP_LINE:0:COMP_POINT}"
    COMPREPLY=($(compgen -W "$(COMP_LINE="$line" "${COMP_WORDS[0]}" completion query 2>/dev/null)" -- "$current"))
    if [[ ${#COMPREPLY[@]} -eq 1 ]]; then
        if [[ -d "${COMPREPLY[0]#*=}" ]]; then COMPREPLY[0]+="/"
        elif [[ "${COMPREPLY[0]}" != *[=./] ]]; then COMPREPLY[0]+=" "
        fi
    fi
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _titanlab titanlab
"""
_FLAGS = ("--cfg", "--config-dir", "--help", "--info", "--multirun", "--package", "--resolve")
_SWEEP_FLAGS = ("--dry-run", "--wait", "--force", "--json")
# Hydra's flags that say where configs are. Each takes a value.
_PLACES = {
    **dict.fromkeys(("--config-dir", "-cd"), "--config-dir"),
    **dict.fromkeys(("--config-name", "-cn"), "--config-name"),
    **dict.fromkeys(("--config-path", "-cp"), "--config-path"),
}
_OTHER_VALUES = ("--cfg", "-c", "--info", "-i", "--package", "-p")


def main(arguments: Sequence[str]) -> int:
    """`bash` prints the script; `query` answers it from COMP_LINE."""
    parser = Arguments("completion", 'Print a shell\'s completion script: eval "$(titanlab completion bash)"')
    parser.add_argument("shell", nargs="*", default=[], help="bash (default); zsh too, after bashcompinit")
    shell = " ".join(parser.parse_args(arguments).shell) or "bash"
    if shell == "bash":
        print(_BASH, end="")
    elif shell == "query":
        print(*_words(os.environ.get("COMP_LINE", "titanlab ")))
    else:
        raise ConfigError(
            "completion", shell, "is no shell that is known here", "try bash (in zsh, run bashcompinit first)"
        )
    return 0


def _words(line: str) -> Sequence[str]:
    """What may stand where the cursor is."""
    before, current = _split(line)
    if len(before) < 2:
        return list(VERBS)
    verb, given = before[1], before[2:]
    if verb in ("train", "sweep"):
        return _of_recipe(verb, given, current)
    if verb == "completion":
        return ["bash"]
    if verb not in VERBS:
        return []
    return _of_arguments(parser_of(importlib.import_module(VERBS[verb][0]).main), given, current)


def _split(line: str) -> tuple[list[str], str]:
    """The whole words before the cursor, and the one that is being typed."""
    try:
        words = shlex.split(line)
    except ValueError:  # An open quotation mark.
        words = line.split()
    if line[-1:].isspace() or not words:
        return words, ""
    return words[:-1], words[-1]


def _of_arguments(parser: Arguments, given: Sequence[str], current: str) -> Sequence[str]:
    """For a verb that takes no recipe. Where a file may stand nothing is said: the shell completes it."""
    options = parser.options()
    values: dict[str, str] = {}
    words: list[str] = []
    awaited: argparse.Action | None = None
    for word in given:
        name, equals, value = word.partition("=")
        if awaited is not None:
            values[awaited.dest] = word
            awaited = None
        elif not word.startswith("-"):
            words.append(word)
        elif name in options and options[name].nargs != 0:
            values[options[name].dest] = value
            awaited = None if equals else options[name]
    if awaited is not None:
        return sorted(OutcomeKind) if awaited.dest == "outcome" else []
    if current.startswith("-"):
        return sorted(name for name in options if name.startswith("--"))
    places = parser.positionals()
    place = min(len(words), len(places) - 1)
    if place < 0 or (place < len(words) and places[place].nargs not in ("*", "+")):
        return []
    return _of_place(places[place].dest, words, current, runs=_expanded(values.get("runs", "runs")))


def _of_place(place: str, words: Sequence[str], current: str, *, runs: str) -> Sequence[str]:
    """What may stand at one of a verb's places.

    Args:
        place: name of the argument.
        words: those at the places before.
        runs: folder of runs.
    """
    if place == "sweep":
        return _sweeps(runs)
    if place == "runs_and_sweeps":
        names = [*_sweeps(runs), *_run_names(runs)]
        return [name for name in names if name not in words]
    if place == "run" and not words:
        return _run_names(runs)
    if place == "overrides" or (place == "runs_and_keys" and current.startswith(("launch", "cluster"))):
        return _hydra((), (), current)
    if place in ("run", "runs_and_keys"):
        return [run.path.name for run in _runs_of(words[0], runs) if run.path.name not in words[1:]]
    return []


def _expanded(text: str) -> str:
    """A folder as the shell will write it: COMP_LINE has it as it was typed."""
    return os.path.expanduser(os.path.expandvars(text))


def _sweeps(runs: str) -> list[str]:
    return [path.name for path in sorted(Path(runs).glob("*")) if path.is_dir()]


def _run_names(runs: str) -> list[str]:
    """All runs by their folder's name, with the sweep before it where two sweeps have a run of that name."""
    known = list_runs(runs)
    counts = Counter(run.path.name for run in known)
    return [run.path.name if counts[run.path.name] == 1 else f"{run.sweep}/{run.path.name}" for run in known]


def _runs_of(sweep: str, runs: str) -> list[RunFolder]:
    with contextlib.suppress(ConfigError):
        return open_sweep(sweep, runs).runs()
    return []


def _of_recipe(verb: str, given: Sequence[str], current: str) -> Sequence[str]:
    """For a verb that Hydra composes a recipe for."""
    places: list[str] = []
    overrides: list[str] = []
    awaited = ""
    for word in given:
        name, equals, value = word.partition("=")
        if awaited:
            places += [_PLACES[awaited], _expanded(word)] if awaited in _PLACES else []
            awaited = ""
        elif not word.startswith("-"):
            overrides.append(word)
        elif name in _PLACES and equals:
            places += [_PLACES[name], _expanded(value)]
        elif name in (*_PLACES, *_OTHER_VALUES) and not equals:
            awaited = name
    if awaited:
        return ["hydra", "job", "all"] if awaited in ("--cfg", "-c") else []
    if current.startswith("-"):
        return [*_FLAGS, *(_SWEEP_FLAGS if verb == "sweep" else ())]
    return _hydra(places, overrides, current)


def _hydra(places: Sequence[str], overrides: Sequence[str], current: str) -> Sequence[str]:
    """Hydra's own completion.

    Args:
        places: flags that say where configs are, with their values.
        overrides: those before the cursor.
    """
    # It splits the line at spaces, and fails at flags that are not Hydra's.
    os.environ["COMP_LINE"] = " ".join(["titanlab", *(each for each in overrides if " " not in each), current])
    found = io.StringIO()
    with contextlib.redirect_stdout(found):
        answer(read_flags([*places, "-sc", "query=bash"]))
    # Schemas are there for YAMLs to build on.
    return [word for word in found.getvalue().split() if not word.endswith("schema")]
