"""Addresses of remote stores, such as `s3://bucket/folder`, and checks of these addresses. Free of torch."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.system import user_path

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_LOCAL = ("file", "local")
# Protocols of fsspec that cannot write files, or that wrap another store.
_UNUSABLE = ("http", "https", "data", "git", "github", "reference", "zip", "tar", "libarchive", "generic", "dir")
_WRAPPERS = ("cached", "blockcache", "filecache", "simplecache")
_PRIVATE = ("memory",)
# What the tests use for a store; docs/checkpoints.md says it too.
TESTED = "the tests use an emulated object store through fsspec, not a real one"
_SECRET = "***"
# Protocols in which the text before @ is a user or a container; in other protocols it may be a secret token.
_WITH_USER = ("sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs", "abfs", "abfss", "wasb", "wasbs", "az", "adl", "oci")


@dataclass(frozen=True, order=True)
class StorePath:
    """A folder or an object of a remote store; it has the attributes of `pathlib.Path` that need no store.

    Attributes:
        address: the whole address, with the protocol, and without a slash at its end.
    """

    address: str

    def __str__(self) -> str:
        return self.address

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self.address}/{name}")

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]

    @property
    def stem(self) -> str:
        return Path(self.name).stem

    @property
    def parent(self) -> StorePath:
        return StorePath(self.address.rpartition("/")[0])

    def with_name(self, name: str) -> StorePath:
        return self.parent / name

    def resolve(self) -> StorePath:
        """The same path: a store has no links to resolve."""
        return self

    @property
    def protocol(self) -> str:
        return self.address.partition("://")[0]


Place = Path | StorePath
"""Where a checkpoint is: a folder of this host, or the objects of a store whose names begin with an address."""


def is_address(text: str) -> bool:
    return _ADDRESS.match(text) is not None


def place_of(text: str) -> Place:
    return StorePath(text.rstrip("/")) if is_address(text) else user_path(text)


def check_address(key: str, text: str) -> None:
    """Check an address before it is written anywhere.

    Raises:
        ConfigError: the address contains a secret, which config.yaml would show, or is not a folder of a remote store.
    """
    match = _ADDRESS.match(text)
    if match is None:
        rule = "is not an address of a remote store"
        raise ConfigError(key, text, rule, "try s3://bucket/folder; on this host, checkpoints are in the run's folder")
    protocol, rest = match[1].lower(), text[match.end() :]
    authority = rest.partition("/")[0]
    user, at, _ = authority.rpartition("@")
    if at and (":" in user or protocol not in _WITH_USER):
        # Hide the secret, because errors show the value.
        shown = text.replace(user, _SECRET)
        rule = "holds a password or a token, and config.yaml, the logs and the tracker would hold it too"
        raise ConfigError(key, shown, rule, _elsewhere(text.replace(f"{user}@", "")))
    if "?" in rest or "#" in rest:
        kept = text.partition("?")[0].partition("#")[0]
        rule = "holds options after ? or #, which may be secret"
        raise ConfigError(key, f"{kept}?{_SECRET}", rule, _elsewhere(kept))
    if protocol in _LOCAL:
        rule = "is an address on this host, where checkpoints are kept in the run's folder"
        raise ConfigError(key, text, rule, "leave it out; runs=FOLDER chooses the disk")
    if "::" in text or protocol in (*_UNUSABLE, *_WRAPPERS):
        raise ConfigError(
            key, text, "takes no checkpoints", f"give the address of a store, such as s3://bucket/folder; {TESTED}"
        )
    parts = rest.rstrip("/").split("/")
    if text.strip() != text or any(character < " " for character in text) or any(p in ("", ".", "..") for p in parts):
        rule = "is not a plain address: a part of it is empty, . or .., or it has spaces around it"
        raise ConfigError(key, text, rule, "try s3://bucket/folder")
    if any(character in rest for character in "*[]"):
        # Some methods of fsspec read these characters as patterns.
        raise ConfigError(key, text, "has one of the characters * [ ]", "choose a name without them")


def check_installed(key: str, text: str) -> None:
    """Check that a store can be used: its package is installed, and all processes see the same files.

    Raises:
        ConfigError: the store cannot be used, or no package is known for the protocol.
    """
    protocol = StorePath(text).protocol
    if protocol in _PRIVATE:
        rule = "is a store inside each process: the checkpoints would be lost when the ranks end"
        raise ConfigError(key, text, rule, f"try s3://bucket/folder, or leave it out; {TESTED}")
    fsspec: Any = importlib.import_module("fsspec")
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        rule = f"no installed package knows {protocol}://"
        raise ConfigError(key, text, rule, "install the package of fsspec for this store, or correct it") from None
    except ImportError as error:
        known: dict[str, Any] = importlib.import_module("fsspec.registry").known_implementations
        package = str(known.get(protocol, {}).get("class", "")).partition(".")[0]
        if package in ("", "fsspec") or importlib.util.find_spec(package) is not None:
            # The store's module exists, but a module that it imports does not.
            raise ConfigError(key, text, f"{protocol}:// cannot be used ({error})", "install what is missing") from None
        rule = f"needs the package {package}, which is not installed"
        raise ConfigError(key, text, rule, f"pip install {package}") from None


def _elsewhere(text: str) -> str:
    return f"give {text}, and the secret to the store's own environment variables or files (AWS_ACCESS_KEY_ID …)"
