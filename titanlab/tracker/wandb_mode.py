"""Whether wandb works online or offline: what the config, the environment and netrc say."""

from __future__ import annotations

import netrc
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from titanlab.system.files import home
from titanlab.tracker.wandb_schema import Wandb

_ENV_MODES = {"online": "online", "offline": "offline", "dryrun": "offline", "disabled": "off"}


def resolve_mode(config: Wandb, environ: Mapping[str, str]) -> str:
    """`online`, `offline` or `off`."""
    mode = config.mode
    if mode == "auto":
        mode = _ENV_MODES.get(environ.get("WANDB_MODE", ""), "online")
    return "offline" if mode == "online" and not has_key(environ) else mode


def has_key(environ: Mapping[str, str]) -> bool:
    """Whether wandb can log in: with a key or an identity token in the environment, or with an entry in netrc."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    folder = environ.get("HOME") or home()
    usual = [] if folder is None else [Path(folder) / ".netrc", Path(folder) / "_netrc"]
    files = [Path(environ["NETRC"])] if environ.get("NETRC") else usual
    for path in files:
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
