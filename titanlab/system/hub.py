"""The Hugging Face hub: whether it can be reached, and what it says when it gives nothing, as one line for people."""

from __future__ import annotations

import http.client
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from urllib.parse import urlsplit

from titanlab.errors import ConfigError

CONNECT_SECONDS = 1.2
ANSWER_SECONDS = 10.0
_USUAL = "https://huggingface.co"
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


def silence() -> float | None:
    """Seconds within which nothing answered at the hub's address, or at that of the proxy before it.

    None: something answers, whatever it says. huggingface_hub and datasets try again for half a minute before they say
    that there is no network, and for minutes where something accepts a connection and says nothing.
    """
    # HF_HUB_ETAG_TIMEOUT is how long the library itself waits.
    for does_answer, usual in ((_connects, CONNECT_SECONDS), (_speaks, ANSWER_SECONDS)):
        seconds = _seconds(usual)
        answers: list[bool] = []
        # In a thread: looking up a name takes what time the system's resolver takes.
        probe = threading.Thread(target=_keep_answer, args=(does_answer, seconds, answers), daemon=True)
        probe.start()
        probe.join(seconds)
        if not answers or not answers[0]:
            return seconds
    return None


def _keep_answer(does_answer: Callable[[float], bool], seconds: float, answers: list[bool]) -> None:
    answers.append(does_answer(seconds))


def _connects(seconds: float) -> bool:
    try:
        socket.create_connection(_address(), timeout=seconds).close()
    except (OSError, UnicodeError):
        return False
    return True


class _AsItIs(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: that there is one is an answer."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


def _speaks(seconds: float) -> bool:
    endpoint, proxy = _endpoint(), _proxy()
    proxies = urllib.request.ProxyHandler({urlsplit(endpoint).scheme: proxy} if proxy else {})
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.build_opener(_AsItIs(), proxies).open(request, timeout=seconds).close()
    except TimeoutError:
        return False
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        # What else is wrong the library tells: it may know other certificates, or proxies of another kind.
        return not isinstance(getattr(error, "reason", None), TimeoutError)
    return True


def unreachable(name: str, key: str = "repo") -> ConfigError | None:
    """The error for a person where the hub does not answer, before a library tries for long; None: it does."""
    if is_offline():
        rule = "is to be fetched from the hub, and HF_HUB_OFFLINE is set"
        return ConfigError(key, name, rule, "unset it, or copy the files by hand")
    if not _is_address(_endpoint()):
        return ConfigError("HF_ENDPOINT", _endpoint(), "is no address of a hub", f"leave it out, or try {_USUAL}")
    seconds = silence()
    if seconds is None:
        return None
    host, port = _address()
    rule = f"the hub cannot be reached: {host}:{port} does not answer within {seconds:g} s"
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


def _seconds(usual: float) -> float:
    try:
        return max(float(os.environ["HF_HUB_ETAG_TIMEOUT"]), 0.1)
    except (KeyError, ValueError):
        return usual


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", _USUAL)


def _is_address(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _proxy() -> str | None:
    """The proxy before the hub; None: there is none, or the hub is not to be reached through it."""
    endpoint = urlsplit(_endpoint())
    proxies = urllib.request.getproxies()
    proxy = proxies.get(endpoint.scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(endpoint.hostname or ""):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _address() -> tuple[str, int]:
    """Where a connection to the hub goes first."""
    endpoint, through = urlsplit(_endpoint()), urlsplit(_proxy() or "")
    if through.hostname:
        return through.hostname, through.port or _PORTS.get(through.scheme, 80)
    return endpoint.hostname or "huggingface.co", endpoint.port or _PORTS.get(endpoint.scheme, 443)
