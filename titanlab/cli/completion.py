"""`titanlab completion bash`: print a script that completes verbs, groups, options, keys, sweeps and runs."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from titanlab.cli.arguments import Arguments, parser_of
from titanlab.cli.compose import answer
from titanlab.cli.resume import FLAG, train_from
from titanlab.cli.verbs import VERBS, main_of
from titanlab.errors import ConfigError
from titanlab.recipe.flags import read_flags
from titanlab.records.outcome import OutcomeKind
from titanlab.records.run_folder import RunFolder
from titanlab.records.run_search import list_runs
from titanlab.sweep.sweep_folder import open_sweep

# The script calls the program as the user typed it, so that it need not be on PATH. An equals sign must not begin a
# new word, or `model=` could not be completed. A complete word gets a space; a group or a key gets none.
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
# Flags by verb, for verbs that take a recipe.
_RECIPE_FLAGS = {
    "train": (*_FLAGS, FLAG),
    "sweep": (*_FLAGS, "--dry-run", "--prune", "--keep", "--wait", "--force", "--json"),
    "plan": (
        *("--top", "--why", "--vary", "--explain", "--plot", "--trace", "--rank", "--json"),
        *("--calibrate", "--measure", "--out", "--runs", "--help"),
    ),
    "parity": ("--steps", "--processes", "--only", "--inductor", "--json", "--runs", "--help"),
    "rehearse": ("--only", "--steps", "--processes", "--keep", "--inductor", "--json", "--runs", "--help"),
}
# Hydra's flags that say where configs are, all with a value.
_CONFIG_FLAGS = {
    **dict.fromkeys(("--config-dir", "-cd"), "--config-dir"),
    **dict.fromkeys(("--config-name", "-cn"), "--config-name"),
    **dict.fromkeys(("--config-path", "-cp"), "--config-path"),
}
_OTHER_VALUES = ("--cfg", "-c", "--info", "-i", "--package", "-p", "--top", "--vary", "--plot", "--calibrate", "--out",
                 "--steps", "--processes", "--only", "--keep", "--runs", "--rank")  # fmt: skip


def completion_verb(arguments: Sequence[str]) -> int:
    """Print the script (`bash`), or the completions of COMP_LINE that the script asks for (`query`)."""
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
    """The possible words at the cursor."""
    before, current = _split(line)
    if len(before) < 2:
        return list(VERBS)
    verb, arguments = before[1], before[2:]
    if verb == "train" and any(word.partition("=")[0] == FLAG for word in arguments):
        return _complete_arguments(parser_of(train_from), arguments, current)
    if verb in _RECIPE_FLAGS:
        return _complete_recipe(verb, arguments, current)
    if verb == "completion":
        return ["bash"]
    if verb not in VERBS:
        return []
    return _complete_arguments(parser_of(main_of(verb)), arguments, current)


def _split(line: str) -> tuple[list[str], str]:
    """The complete words before the cursor, and the word at the cursor."""
    try:
        words = shlex.split(line)
    except ValueError:  # An open quotation mark.
        words = line.split()
    if line[-1:].isspace() or not words:
        return words, ""
    return words[:-1], words[-1]


def _complete_arguments(parser: Arguments, arguments: Sequence[str], current: str) -> Sequence[str]:
    """The possible words for a verb that takes no recipe; none for a file, because the shell completes files."""
    options = parser.options()
    values: dict[str, str] = {}
    words: list[str] = []
    option: argparse.Action | None = None  # the last word, if it is an option that needs a value
    for word in arguments:
        name, equals, value = word.partition("=")
        if option is not None:
            values[option.dest] = word
            option = None
        elif not word.startswith("-"):
            words.append(word)
        elif name in options and options[name].nargs != 0:
            values[options[name].dest] = value
            option = None if equals else options[name]
    if option is not None:
        if option.dest == "run":
            return _run_names(_expanded(values.get("runs", "runs")))
        return sorted(OutcomeKind) if option.dest == "outcome" else []
    if current.startswith("-"):
        return sorted(name for name in options if name.startswith("--"))
    positionals = parser.positionals()
    place = min(len(words), len(positionals) - 1)
    if place < 0 or (place < len(words) and positionals[place].nargs not in ("*", "+")):
        return []
    return _complete_positional(positionals[place].dest, words, current, runs=_expanded(values.get("runs", "runs")))


def _complete_positional(argument: str, words: Sequence[str], current: str, *, runs: str) -> Sequence[str]:
    """The possible words for a positional argument.

    Args:
        argument: name of the argument.
        words: the positional arguments before it.
        runs: folder of runs.
    """
    if argument == "sweep":
        return _sweeps(runs)
    if argument == "runs_and_sweeps":
        names = [*_sweeps(runs), *_run_names(runs)]
        return [name for name in names if name not in words]
    if argument == "run" and not words:
        return _run_names(runs)
    if argument == "overrides" or (argument == "runs_and_keys" and current.startswith(("launch", "cluster"))):
        return _hydra((), (), current)
    if argument in ("run", "runs_and_keys"):
        return [run.path.name for run in _runs_of(words[0], runs) if run.path.name not in words[1:]]
    return []


def _expanded(text: str) -> str:
    """A folder with `~` and variables expanded: COMP_LINE has the text as it was typed."""
    return os.path.expanduser(os.path.expandvars(text))


def _sweeps(runs: str) -> list[str]:
    return [path.name for path in sorted(Path(runs).glob("*")) if path.is_dir()]


def _run_names(runs: str) -> list[str]:
    """Folder names of all runs, in the form `sweep/folder` if several sweeps have a run of that name."""
    known = list_runs(runs)
    counts = Counter(run.path.name for run in known)
    return [run.path.name if counts[run.path.name] == 1 else f"{run.sweep}/{run.path.name}" for run in known]


def _runs_of(sweep: str, runs: str) -> list[RunFolder]:
    with contextlib.suppress(ConfigError):
        return open_sweep(sweep, runs).runs()
    return []


def _complete_recipe(verb: str, arguments: Sequence[str], current: str) -> Sequence[str]:
    """The possible words for a verb that takes a recipe."""
    config_flags: list[str] = []
    overrides: list[str] = []
    flag = ""  # the last word, if it is a flag that needs a value
    for word in arguments:
        name, equals, value = word.partition("=")
        if flag:
            config_flags += [_CONFIG_FLAGS[flag], _expanded(word)] if flag in _CONFIG_FLAGS else []
            flag = ""
        elif not word.startswith("-"):
            overrides.append(word)
        elif name in _CONFIG_FLAGS and equals:
            config_flags += [_CONFIG_FLAGS[name], _expanded(value)]
        elif name in (*_CONFIG_FLAGS, *_OTHER_VALUES) and not equals:
            flag = name
    if flag:
        return ["hydra", "job", "all"] if flag in ("--cfg", "-c") else []
    if current.startswith("-"):
        return _RECIPE_FLAGS[verb]
    return _hydra(config_flags, overrides, current)


def _hydra(config_flags: Sequence[str], overrides: Sequence[str], current: str) -> Sequence[str]:
    """The completions that Hydra finds.

    Args:
        config_flags: flags that say where configs are, with their values.
        overrides: the overrides before the cursor.
    """
    # Hydra splits the line at spaces, and fails at flags that it does not know.
    os.environ["COMP_LINE"] = " ".join(["titanlab", *(text for text in overrides if " " not in text), current])
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        answer(read_flags([*config_flags, "-sc", "query=bash"]))
    # Schemas are no options: YAML files name them in their defaults.
    return [word for word in output.getvalue().split() if not word.endswith("schema")]
