"""What every rank runs: `python -m titanlab.worker FOLDER`.

It sets the environment that torch reads when it is imported, then imports torch, reads the run's frozen
config.yaml and trains. It knows no Hydra.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from titanlab.host import cores
from titanlab.outcome import exit_code, from_exception
from titanlab.ranks import ALONE, Ranks, joined
from titanlab.recipe import Recipe, from_mapping
from titanlab.run_folder import open_run


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the run in a folder as the rank that the environment names. Returns the process's exit code."""
    (folder,) = sys.argv[1:] if arguments is None else arguments
    _end_with_parent()
    ranks = joined(os.environ) or ALONE
    run = open_run(Path(folder))
    attempt = max(run.attempts(), default=1)
    recipe = from_mapping(run.config(attempt))
    os.environ.update(environment(recipe, ranks))
    try:
        # Not at the top: importing torch reads the variables that were set just now.
        outcome = importlib.import_module("titanlab.train").train(recipe, run, ranks)
    except BaseException as error:
        # Whoever started the ranks tells from these notes whose failure made the others fail.
        run.write_failure(from_exception(error, rank=ranks.rank, attempt=attempt))
        traceback.print_exc()
        return exit_code(error)
    return int(outcome.kind.exit_code)


def environment(recipe: Recipe, ranks: Ranks) -> dict[str, str]:
    """Variables that must be set before torch is imported; a person's own settings win."""
    threads = getattr(recipe.launch, "threads", None) or max(1, cores() // ranks.local_world)
    wanted = {
        **ranks.environment(),
        "OMP_NUM_THREADS": str(threads),
        # Fewer fragments at the memory's edge; the name changed in torch 2.10.
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        # The Flight Recorder keeps the last collectives of every rank.
        "TORCH_FR_BUFFER_SIZE": "2000",
        # Ranks fork data readers; the tokenizers library warns about that unless it is told.
        "TOKENIZERS_PARALLELISM": "false",
    }
    if recipe.training.deterministic:
        wanted["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _end_with_parent() -> None:
    """Ask Linux to end this rank when the launcher that started it dies, so that none is left behind."""
    parent = os.environ.get("TITANLAB_PARENT")
    if parent is None or sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != int(parent):
        # It died before we asked.
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
