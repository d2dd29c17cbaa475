"""Configs of checkpoints: which values go together, the saver of each kind, and addresses of stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny
from tests.refusals import refusal
from titanlab.checkpoint import check_address
from titanlab.checkpoint.address_schema import TESTED, check_installed
from titanlab.checkpoint.schema import Async, AsyncPinned, Sync
from titanlab.errors import ConfigError
from titanlab.recipe import to_mapping
from titanlab.recipe.next_attempt import overridden
from titanlab.records import canonical

DTYPES = "float32, bfloat16, float16"
LAST = "try checkpoint.last=model, or null"
FEW = "no multiple of checkpoint.every=300, so few of these steps would be saved"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"every": -1}, "checkpoint.every=-1: must not be negative; try 0"),
        ({"minutes": -0.5}, "checkpoint.minutes=-0.5: must not be negative; try 0"),
        ({"keep": -2}, "checkpoint.keep=-2: must not be negative; try 0"),
        ({"keep_every": -3}, "checkpoint.keep_every=-3: must not be negative; try 0"),
        ({"last": "weights"}, "checkpoint.last=weights: is not known; try full or model"),
        (
            {"last": "model", "last_dtype": "int8"},
            f"checkpoint.last_dtype=int8: is not known; try one of {DTYPES}, or null",
        ),
        (
            {"last_dtype": "bfloat16"},
            f"checkpoint.last_dtype=bfloat16: a full checkpoint has the dtypes of the training; {LAST}",
        ),
        (
            {"every": 300, "keep_every": 1000},
            f"checkpoint.keep_every=1000: {FEW}; try 900",
        ),
        (
            {"every": 300, "keep_every": 10},
            f"checkpoint.keep_every=10: {FEW}; try 300",
        ),
    ],
)
def test_values_that_do_not_are_told(given, said):
    assert refusal(Sync, **given) == said


def test_a_folder_of_this_host_needs_no_package():
    Sync().check_installed()
    with pytest.raises(ConfigError, match=r"^checkpoint\.folder="):
        Sync(folder="nosuchstore://bucket/x").check_installed()


def test_pinned_memory_is_refused_on_cpu():
    class Setting:
        accelerator = "cpu"

    with pytest.raises(ConfigError, match="checkpoint=async_pinned: pinned memory is for GPUs; try checkpoint=async"):
        AsyncPinned().check(Setting())


def test_how_a_run_saves_is_no_part_of_its_identity(tmp_path):
    assert canonical(tiny.recipe(tmp_path, every=3)) == canonical(tiny.recipe(tmp_path, every=3, saves="async"))


def test_how_a_run_saves_may_change_between_its_attempts(tmp_path):
    config = to_mapping(tiny.recipe(tmp_path, every=3))
    made = overridden(config, ["checkpoint.kind=async", "checkpoint.minutes=10"], file=tmp_path / "config.yaml")
    assert made.checkpoint == Async(every=3, minutes=10.0)


SECRETS = {
    "s3://user:pa55@bucket/folder": "holds a password.*give s3://bucket/folder, and the secret to the store's own",
    "sftp://user:pa55@host:22/folder": "holds a password",
    "s3://:pa55@bucket": "holds a password",
    "s3://pa55@bucket/folder": "holds a password or a token.*give s3://bucket/folder, and the secret",
    "gs://pa55@bucket": "holds a password or a token",
    "az://box/folder?sig=pa55": "holds options after",
    "az://box/folder#pa55": "holds options after",
}
REFUSED = {
    "": "is not an address",
    "/tmp/checkpoints": "is not an address",
    "s3:/bucket": "is not an address",
    "file:///tmp/checkpoints": "is an address on this host",
    "LOCAL://checkpoints": "is an address on this host",
    "https://host/folder": "takes no checkpoints",
    "filecache::s3://bucket": "is not an address|takes no checkpoints",
    "zip://a.zip::s3://bucket": "takes no checkpoints",
    "s3://": "is not a plain address",
    "s3:///folder": "is not a plain address",
    "s3://bucket//folder": "is not a plain address",
    "s3://bucket/../other": "is not a plain address",
    "s3://bucket/fol\nder": "is not a plain address",
    "s3://bucket/folder ": "is not a plain address",
    "s3://bucket/step-*": "has one of the characters",
}


@pytest.mark.parametrize("key", ["folder", "load_from"])
@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_is_refused_and_never_shown(text, key):
    with pytest.raises(ConfigError, match=SECRETS[text]) as error:
        Sync(**{key: text})
    assert "pa55" not in str(error.value)
    assert error.value.key == f"checkpoint.{key}"


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_folder_of_a_store_is_refused(text):
    with pytest.raises(ConfigError, match=REFUSED[text]):
        Sync(folder=text)


@pytest.mark.parametrize(
    "text", ["s3://bucket", "s3://bucket/a/b/", "abfs://box@account.dfs.core.windows.net/a", "sftp://user@host/a"]
)
def test_plain_addresses_pass(text):
    check_address("key", text)


def test_a_store_whose_package_is_missing_is_refused_with_its_name(monkeypatch):
    def missing(protocol):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.get_filesystem_class", missing)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package s3fs, which is not installed; pip install s3fs"):
        check_installed("checkpoint.folder", "s3://bucket")


def test_the_page_and_the_refusals_say_which_stores_are_tested():
    page = Path(__file__).parents[2] / "docs" / "checkpoints.md"
    assert TESTED in " ".join(page.read_text().split())
    for check, text in ((check_address, "https://host/folder"), (check_installed, "memory://bucket")):
        with pytest.raises(ConfigError, match=TESTED):
            check("checkpoint.folder", text)


def test_a_store_of_one_process_is_refused():
    """A run there was done, and had no checkpoint."""
    with pytest.raises(ConfigError, match="memory://bucket: is a store inside each process: .*leave it out"):
        check_installed("checkpoint.folder", "memory://bucket")
