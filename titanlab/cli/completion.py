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

from titanlab.cli.arguments import FROM, VERBS
from titanlab.cli.compose import answer
from titanlab.errors import ConfigError
from titanlab.recipe import flag_parser, read_flags
from titanlab.records import OutcomeKind, list_runs
from titanlab.sweep import open_sweep

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
# Hydra's flags that the completion offers.
_HYDRA_FLAGS = ("--cfg", "--config-dir", "--help", "--info", "--multirun", "--package", "--resolve")


def completion_verb(args: argparse.Namespace) -> int:
    """Print the script (`bash`), or the completions of COMP_LINE that the script asks for (`query`)."""
    shell = " ".join(args.shell) or "bash"
    if shell == "bash":
        print(_BASH, end="")
    elif shell == "query":
        print(*_words(os.environ.get("COMP_LINE", "titanlab ")))
    else:
        cure = "try bash (in zsh, run bashcompinit first)"
        raise ConfigError("completion", shell, "is not a known shell", cure)
    return 0


def _words(line: str) -> Sequence[str]:
    """The possible words at the cursor; none for a file, because the shell completes files."""
    try:
        words = shlex.split(line)
    except ValueError:  # An open quotation mark.
        words = line.split()
    current = "" if line[-1:].isspace() or not words else words.pop()
    if len(words) < 2:
        return list(VERBS)
    verb, typed = words[1], words[2:]
    if verb not in VERBS or verb == "completion":
        return ["bash"] if verb == "completion" else []
    parser = VERBS[verb].parser(verb)
    options = {name: action for action in parser._actions for name in action.option_strings}
    flags = {name for name in options if name.startswith("--")}
    is_new_run = verb == "train" and not any(word.partition("=")[0] == FROM for word in typed)
    takes_recipe = parser.takes_recipe or is_new_run
    if verb == "sweep" or is_new_run:
        # Hydra's own flags, which it parses itself.
        flags = {*_HYDRA_FLAGS, *(flags if verb == "sweep" else [FROM, "--dry-run"])}
    if takes_recipe:
        options = {name: action for action in flag_parser()._actions for name in action.option_strings} | options
    # Sort the words before the cursor. values: variable of an option → the option's value. others: all other words.
    values: dict[str, str] = {}
    others: list[str] = []
    pending = ""  # The variable of the last word, if that word is an option whose value is missing.
    for word in typed:
        name, equals, value = word.partition("=")
        if pending:
            values[pending], pending = word, ""
        elif not word.startswith("-"):
            others.append(word)
        elif name in options and options[name].nargs != 0:
            pending = "" if equals else options[name].dest
            values[options[name].dest] = value
    # COMP_LINE has folders as the user typed them: expand `~` and variables.
    values = {name: os.path.expanduser(os.path.expandvars(value)) for name, value in values.items()}
    runs = values.get("runs") or "runs"
    if pending:
        known: dict[str, list[str]] = {"outcome": sorted(OutcomeKind), "cfg": ["hydra", "job", "all"]}
        return _run_names(runs) if pending == "run" else known.get(pending, [])
    if current.startswith("-"):
        return sorted(flags)
    if takes_recipe:
        folders = ("config_dir", "config_name", "config_path")
        where = [f"--{name.replace('_', '-')}={values[name]}" for name in folders if values.get(name)]
        return _hydra(where, others, current)
    positionals = [action for action in parser._actions if not action.option_strings]
    place = min(len(others), len(positionals) - 1)
    if place < 0 or (place < len(others) and positionals[place].nargs not in ("*", "+")):
        return []
    argument = positionals[place].dest
    sweeps = [path.name for path in sorted(Path(runs).glob("*")) if path.is_dir()]
    if argument == "sweep":
        return sweeps
    if argument == "runs_and_sweeps":
        return [name for name in (*sweeps, *_run_names(runs)) if name not in others]
    if argument == "run" and not others:
        return _run_names(runs)
    if argument == "overrides" or (argument == "runs_and_keys" and current.startswith(("launch", "cluster"))):
        return _hydra((), (), current)
    if argument in ("run", "runs_and_keys"):
        with contextlib.suppress(ConfigError):
            return [run.path.name for run in open_sweep(others[0], runs).runs() if run.path.name not in others[1:]]
    return []


def _run_names(runs: str) -> list[str]:
    known = list_runs(runs)
    counts = Counter(run.path.name for run in known)
    return [run.path.name if counts[run.path.name] == 1 else f"{run.sweep}/{run.path.name}" for run in known]


def _hydra(config_flags: Sequence[str], overrides: Sequence[str], current: str) -> Sequence[str]:
    """The completions that Hydra finds; `config_flags` say where configs are, `overrides` stand before the cursor."""
    # Hydra splits the line at spaces, and fails at flags that it does not know.
    os.environ["COMP_LINE"] = " ".join(["titanlab", *(text for text in overrides if " " not in text), current])
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        answer(read_flags([*config_flags, "-sc", "query=bash"]))
    return output.getvalue().split()
