"""Upload of wandb's offline files with `wandb sync`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from titanlab.errors import ConfigError, TitanlabError
from titanlab.tracker.wandb_files import is_uploaded
from titanlab.tracker.wandb_mode import has_key

_CONNECT_SECONDS = 2.0
_USUAL = "https://api.wandb.ai"


def lack(environ: Mapping[str, str] | None = None) -> ConfigError | None:
    """The reason why an upload would fail, no API key or no network; None if no reason is known."""
    environ = os.environ if environ is None else environ
    if not has_key(environ):
        cure = "make one known (`wandb login`, or WANDB_API_KEY), then titanlab sync"
        return ConfigError("WANDB_API_KEY", None, "no API key of wandb was found", cure)
    base = environ.get("WANDB_BASE_URL") or _USUAL
    # Behind a proxy, a direct connection says nothing about wandb's connection.
    if any(environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY")):
        return None
    try:
        url = urlsplit(base)
        port = url.port or (80 if url.scheme == "http" else 443)
        # Checked here, because wandb itself would retry for hours.
        socket.create_connection((url.hostname or "", port), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        cure = "call titanlab sync where there is a network, such as on a login node"
        return ConfigError("WANDB_BASE_URL", base, f"cannot be reached ({error})", cure)
    return None


def upload(runs: Sequence[Sequence[Path]]) -> None:
    """Upload the files of each run in their order; wandb prints to the terminal.

    wandb appends the rows of a file to those that it has under the same id. In one command it would order a run's files
    by the time at which they were begun, and clocks of hosts differ: so each command gets one file of each run.

    Raises:
        TitanlabError: wandb has not uploaded all files.
    """
    for turn in range(max(map(len, runs), default=0)):
        # If a file fails, the later ones of its run wait: wandb drops rows that come too late.
        files = [run[turn] for run in runs if turn < len(run) and all(map(is_uploaded, run[:turn]))]
        if files:
            # -P: nothing is imported from the working directory.
            command = [sys.executable, "-P", "-m", "wandb", "sync", "--include-online", *map(str, files)]
            subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
    left = [file for run in runs for file in run if not is_uploaded(file)]
    if left:
        raise TitanlabError(f"wandb has not uploaded {left[0]}{f' and {len(left) - 1} more' if left[1:] else ''}")
