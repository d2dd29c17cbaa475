"""`titanlab completion bash`: a script that completes verbs, groups, options and keys."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from titanlab.cli.arguments import Arguments
from titanlab.cli.compose import compose
from titanlab.cli.verbs import VERBS
from titanlab.errors import ConfigError
from titanlab.run_search import list_runs
from titanlab.sweep.sweep_folder import SweepFolder

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
# What verbs take, in this order; the last for as many words as there are.
_OF_RUNS = ("resume", "generate", "export")
_OF_SWEEPS = ("status", "cancel", "retry", "collect")
_OF_SWEEPS_AND_RUNS = ("status", "cancel", "retry")
# Flags of these verbs that no value follows.
_SWITCHES = ("-h", "--help", "--all-failed", "--stale", "--dry-run", "--json", "--watch", "--force")
# Flags that say where Hydra looks for options.
_PLACES = ("--config-dir", "--config-path", "--config-name", "-cd", "-cp", "-cn")


def main(arguments: Sequence[str]) -> int:
    """`bash` prints the script; `query` answers it from COMP_LINE."""
    parser = Arguments("completion", 'Print the completion script of a shell: eval "$(titanlab completion bash)"')
    parser.add_argument("shell", nargs="*", help="bash (the default; in zsh, run bashcompinit first)")
    what = " ".join(parser.parse_args(arguments).shell) or "bash"
    if what == "bash":
        print(_BASH, end="")
    elif what == "query":
        print(*_words(os.environ.get("COMP_LINE", "titanlab ")))
    else:
        raise ConfigError(
            "completion", what, "is no shell that is known here", "try bash (in zsh, run bashcompinit first)"
        )
    return 0


def _words(line: str) -> Sequence[str]:
    words = _split(line)
    if len(words) < 2 or (len(words) == 2 and not line.endswith(" ")):
        return list(VERBS)
    verb, given = words[1], words[2:]
    current = "" if line.endswith(" ") else given.pop()
    if verb in _OF_RUNS or verb in _OF_SWEEPS:
        return _runs_and_sweeps(verb, given, current)
    if verb not in ("train", "sweep"):
        return []
    if given[-1:] and given[-1] in _PLACES:
        # A folder or a name, which Hydra does not list; the shell offers files.
        return []
    if current.startswith("-"):
        return _FLAGS
    return _of_hydra(given, current)


def _split(line: str) -> list[str]:
    """The words of a line as the shell has them; a quote may still be open."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def _runs_and_sweeps(verb: str, given: Sequence[str], current: str) -> list[str]:
    """Names for the next word of a verb that takes a run, or a sweep and its runs."""
    named, values = _positions(given)
    if current.startswith("-") or (given and given[-1] in values):
        return []
    runs = values.get("--runs", "runs")
    if verb in _OF_RUNS:
        return [] if named else _run_names(runs)
    if not named:
        folders = sorted(Path(runs).expanduser().glob("*"))
        return [path.name for path in folders if path.is_dir() and not path.name.startswith(".")]
    if verb not in _OF_SWEEPS_AND_RUNS or (verb == "status" and len(named) > 1):
        return []
    # A sweep may be named by its folder, wherever that is.
    place = Path(runs).expanduser() / named[0]
    place = place if place.is_dir() else Path(named[0]).expanduser()
    return [run.path.name for run in SweepFolder(place).runs() if run.path.name not in named]


def _positions(given: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Words that are no flags, and the values of flags; the last flag may still have none."""
    named: list[str] = []
    values: dict[str, str] = {}
    words = iter(given)
    for word in words:
        flag, equals, value = word.partition("=")
        if not word.startswith("-"):
            named.append(word)
        elif word not in _SWITCHES:
            values[flag] = value if equals else next(words, "")
    return named, values


def _run_names(runs: str) -> list[str]:
    """Names of all runs; where several sweeps have a name, with the sweep's before it."""
    found = list_runs(runs)
    counts = Counter(run.path.name for run in found)
    return [run.path.name if counts[run.path.name] == 1 else f"{run.sweep}/{run.path.name}" for run in found]


def _of_hydra(given: Sequence[str], current: str) -> list[str]:
    """Hydra's own completion of groups, options and keys."""
    places: list[str] = []
    kept: list[str] = []
    words = iter(given)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in _PLACES:
            # Hydra looks there if they are its own arguments; in the line they are text.
            value = value if equals else next(words, "")
            places += [flag, str(Path(value).expanduser()) if value.startswith("~") else value]
        elif not word.startswith("-"):
            kept.append(word)
    os.environ["COMP_LINE"] = " ".join(["titanlab", *map(shlex.quote, kept), current])
    found = io.StringIO()
    with contextlib.redirect_stdout(found):
        compose([*places, "-sc", "query=bash"])
    # Schemas are there for YAMLs to build on.
    return [word for word in found.getvalue().split() if not word.endswith("schema")]
