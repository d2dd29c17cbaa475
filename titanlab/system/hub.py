"""The Hugging Face hub: checks that it can be reached, and turns its errors into ConfigErrors."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import socket
import threading
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from titanlab.errors import ConfigError

ANSWER_SECONDS = 10.0
_USUAL = "https://huggingface.co"


def kinds_of(error: Exception) -> set[str]:
    """Names of an error's classes; huggingface_hub's errors have no common base class, and take a second to import."""
    return {base.__name__ for base in type(error).__mro__}


def is_absent(error: Exception) -> bool:
    """Whether the error says that the hub has the model, but the model lacks the file."""
    kinds = kinds_of(error)
    return "EntryNotFoundError" in kinds and "LocalEntryNotFoundError" not in kinds


def hub_error(error: Exception, repo: str, key: str = "repo") -> ConfigError:
    """The ConfigError for an error of huggingface_hub: a gated or missing model, or an unreachable hub."""
    kinds = kinds_of(error)
    status = getattr(getattr(error, "response", None), "status_code", None)
    if "GatedRepoError" in kinds or status in (401, 403):
        rule = "does not let you in: it is gated or private"
        return ConfigError(key, repo, rule, "accept its terms on its page, then give a token with --token or HF_TOKEN")
    if "RevisionNotFoundError" in kinds:
        return ConfigError(key, repo, "has no such revision", "give a branch, tag or commit of the model's page")
    if kinds & {"RepositoryNotFoundError", "HFValidationError"} or (status == 404 and not is_absent(error)):
        return ConfigError(key, repo, "is not a model of the hub, or is private", "check its name; give a --token")
    message = " ".join(str(error).split())[:120]
    return ConfigError(key, repo, f"cannot be fetched ({message})", "check the network, or copy the files by hand")


def silence() -> float | None:
    """The seconds for which the hub, or the proxy before it, gave no answer; None: it answers.

    huggingface_hub and datasets retry for half a minute before they report a missing network, and for minutes if the
    connection is accepted but no response comes.
    """
    seconds = ANSWER_SECONDS
    with contextlib.suppress(KeyError, ValueError):
        # Use the timeout of huggingface_hub, if the user has set it.
        seconds = max(float(os.environ["HF_HUB_ETAG_TIMEOUT"]), 0.1)
    answered = threading.Event()
    # Ask in a separate thread, because name resolution ignores the timeout.
    probe = threading.Thread(target=_ask, args=(seconds, answered), daemon=True)
    probe.start()
    # A refused connection ends the thread at once.
    probe.join(seconds)
    return None if answered.is_set() else seconds


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Does not follow redirects: a redirect is an answer already."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


def _ask(seconds: float, answered: threading.Event) -> None:
    endpoint, proxy = _endpoint(), _proxy()
    proxies = urllib.request.ProxyHandler({urlsplit(endpoint).scheme: proxy} if proxy else {})
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.build_opener(_NoRedirect(), proxies).open(request, timeout=seconds).close()
    except urllib.error.HTTPError as error:
        error.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", error)
        if isinstance(cause, (TimeoutError, ConnectionRefusedError, socket.gaierror)):
            return
        if getattr(cause, "errno", None) in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            return
        # Count any other error as an answer: the library may have other certificates, or support other proxies.
    answered.set()


def unreachable(name: str, key: str = "repo") -> ConfigError | None:
    """The error if the hub does not answer; None if it does. This is faster than a library's retries."""
    if is_offline():
        rule = "is to be fetched from the hub, and HF_HUB_OFFLINE is set"
        return ConfigError(key, name, rule, "unset it, or copy the files by hand")
    parts = None
    with contextlib.suppress(ValueError):
        parts = urlsplit(_endpoint())
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        return ConfigError("HF_ENDPOINT", _endpoint(), "is not an address of a hub", f"leave it out, or try {_USUAL}")
    seconds = silence()
    if seconds is None:
        return None
    # Show the address without the password that a proxy's address may contain.
    address = urlsplit(_proxy() or _endpoint()).netloc.rpartition("@")[2]
    rule = f"the hub cannot be reached: {address} does not answer within {seconds:g} s"
    cure = "check the network, or copy the files by hand; HF_HUB_ETAG_TIMEOUT=30 waits for a slow one"
    return ConfigError(key, name, rule, cure)


def check_reachable(name: str, key: str = "repo") -> None:
    problem = unreachable(name, key)
    if problem is not None:
        raise problem


def is_offline() -> bool:
    """Whether an environment variable tells huggingface_hub or transformers to use only the cache."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", _USUAL)


def _proxy() -> str | None:
    """The proxy for connections to the hub; None: no proxy."""
    endpoint = urlsplit(_endpoint())
    proxies = urllib.request.getproxies()
    proxy = proxies.get(endpoint.scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(endpoint.hostname or ""):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"
