"""What the Hugging Face hub answers when it gives nothing, as one line for people."""

from __future__ import annotations

from titanlab.errors import ConfigError


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
