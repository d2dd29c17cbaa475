"""`titanlab completion bash`: a script that completes verbs, groups, options and keys."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path

from titanlab.cli.compose import compose
from titanlab.cli.verbs import VERBS
from titanlab.errors import ConfigError
from titanlab.run_search import list_runs

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
_OF_RUNS = ("resume", "generate", "export", "sync")
_OF_SWEEPS = ("status", "cancel", "retry", "collect")


def main(arguments: Sequence[str]) -> int:
    """`bash` prints the script; `query` answers it from COMP_LINE."""
    what = " ".join(arguments) or "bash"
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
    words = line.split()
    if len(words) < 2 or (len(words) == 2 and not line.endswith(" ")):
        return list(VERBS)
    if words[1] in _OF_RUNS:
        return [run.path.name for run in list_runs("runs")]
    if words[1] in _OF_SWEEPS:
        return [path.name for path in sorted(Path("runs").glob("*")) if path.is_dir()]
    if words[1] not in ("train", "sweep"):
        return []
    if line.rpartition(" ")[2].startswith("-"):
        return _FLAGS
    # Hydra's own completion, as if the two words were one program's name.
    os.environ["COMP_LINE"] = "titanlab" + (line.partition(f" {words[1]}")[2] or " ")
    found = io.StringIO()
    with contextlib.redirect_stdout(found):
        compose(["-sc", "query=bash"])
    # Schemas are there for YAMLs to build on.
    return [word for word in found.getvalue().split() if not word.endswith("schema")]
