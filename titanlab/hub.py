"""The Hugging Face hub: whether it can be reached, and what it says when it gives nothing, as one line for people."""

from __future__ import annotations

import os
import socket
import threading
import urllib.request
from urllib.parse import urlsplit

from titanlab.errors import ConfigError

CONNECT_SECONDS = 1.2
_PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080, "socks4": 1080}


def kinds_of(error: Exception) -> set[str]:
    """Names of an error's classes: the library's have no base in common, and importing them takes a second."""
    return {each.__name__ for each in type(error).__mro__}


def is_absent(error: Exception) -> bool:
    """Whether the hub has the model, and no file of this name in it."""
    kinds = kinds_of(error)
    return "EntryNotFoundError" in kinds and "LocalEntryNotFoundError" not in kinds


def explained(error: Exception, repo: str, key: str = "repo") -> ConfigError:
    """The error for a person: a model that is gated, that is not there, or a hub that cannot be reached."""
    kinds = kinds_of(error)
    status = getattr(getattr(error, "response", None), "status_code", None)
    if "GatedRepoError" in kinds or status in (401, 403):
        return ConfigError(
            key,
            repo,
            "does not let you in: it is gated or private",
            "accept its terms on its page, then give a token with --token or HF_TOKEN",
        )
    if "RevisionNotFoundError" in kinds:
        return ConfigError(key, repo, "has no such revision", "give a branch, tag or commit of the model's page")
    if kinds & {"RepositoryNotFoundError", "HFValidationError"} or status == 404:
        return ConfigError(key, repo, "is no model of the hub, or a private one", "check its name; give a --token")
    message = " ".join(str(error).split())[:120]
    return ConfigError(key, repo, f"cannot be fetched ({message})", "check the network, or copy the files by hand")


def is_reachable() -> bool:
    """Whether something answers at the hub's address, or at that of the proxy before it, within CONNECT_SECONDS.

    huggingface_hub and datasets try again for half a minute before they say that there is no network.
    """
    host, port = _address()
    seconds = _connect_seconds()
    answers: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=seconds).close()
        except (OSError, UnicodeError):
            answers.append(False)
        else:
            answers.append(True)

    # In a thread: looking up a name takes what time the system's resolver takes.
    probe = threading.Thread(target=connect, daemon=True)
    probe.start()
    probe.join(seconds)
    return bool(answers) and answers[0]


def unreachable(name: str, key: str = "repo") -> ConfigError | None:
    """The error for a person where the hub does not answer, before a library tries for long; None: it does."""
    if is_offline():
        rule = "is to be fetched from the hub, and HF_HUB_OFFLINE is set"
        return ConfigError(key, name, rule, "unset it, or copy the files by hand")
    if is_reachable():
        return None
    host, port = _address()
    rule = f"the hub cannot be reached: {host}:{port} does not answer within {_connect_seconds():g} s"
    cure = "check the network, or copy the files by hand; HF_HUB_ETAG_TIMEOUT=30 waits for a slow one"
    return ConfigError(key, name, rule, cure)


def check_reachable(name: str, key: str = "repo") -> None:
    """Hold the hub to answer.

    Raises:
        ConfigError: nothing answers, or HF_HUB_OFFLINE is set.
    """
    problem = unreachable(name, key)
    if problem is not None:
        raise problem


def is_offline() -> bool:
    """Whether a person has told the hub's library to use its cache only."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


def _connect_seconds() -> float:
    try:
        return max(float(os.environ["HF_HUB_ETAG_TIMEOUT"]), 0.1)
    except (KeyError, ValueError):
        return CONNECT_SECONDS


def _address() -> tuple[str, int]:
    """Where a connection to the hub goes first."""
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    host = endpoint.hostname or "huggingface.co"
    proxies = urllib.request.getproxies()
    proxy = proxies.get(endpoint.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(host):
        through = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        if through.hostname:
            return through.hostname, through.port or _PORTS.get(through.scheme, 80)
    return host, endpoint.port or _PORTS.get(endpoint.scheme, 443)
