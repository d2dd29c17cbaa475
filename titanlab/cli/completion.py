"""`titanlab completion bash`: a script that completes verbs, groups, options and keys."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from titanlab.cli.compose import compose
from titanlab.cli.verbs import VERBS
from titanlab.errors import ConfigError

_BASH = """\
_titanlab() {
    local current="${COMP_WORDS[COMP_CWORD]}"
    COMPREPLY=($(compgen -o nospace -W "$(COMP_LINE="$COMP_LINE" titanlab completion query 2>/dev/null)" -- "$current"))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _titanlab titanlab
"""


def main(arguments: Sequence[str]) -> int:
    """`bash` prints the script; `query` answers it from COMP_LINE."""
    what = arguments[0] if arguments else "bash"
    if what == "bash":
        print(_BASH)
    elif what == "query":
        _query(os.environ.get("COMP_LINE", "titanlab "))
    else:
        raise ConfigError(
            "completion", what, "is no shell that is known here", "try bash (zsh: run bashcompinit first)"
        )
    return 0


def _query(line: str) -> None:
    words = line.split()
    typing_verb = len(words) < 2 or (len(words) == 2 and not line.endswith(" "))
    if typing_verb:
        print(" ".join(VERBS))
    elif words[1] == "train":
        # Hydra's own completion, as if `train` were a program of its own.
        rest = line.partition(" train")[2]
        os.environ["COMP_LINE"] = "titanlab" + (rest or " ")
        sys.stdout.flush()
        compose(["-sc", "query=bash"], start=lambda recipes: None)
