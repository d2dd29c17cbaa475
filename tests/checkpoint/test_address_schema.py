from pathlib import Path

import pytest

from titanlab.checkpoint import StorePath, check_address, is_address
from titanlab.checkpoint.address_schema import TESTED, check_installed, place_of
from titanlab.checkpoint.schema import Sync
from titanlab.errors import ConfigError

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
    "": "is no address",
    "/tmp/checkpoints": "is no address",
    "s3:/bucket": "is no address",
    "file:///tmp/checkpoints": "is of this host",
    "LOCAL://checkpoints": "is of this host",
    "https://host/folder": "takes no checkpoints",
    "filecache::s3://bucket": "is no address|takes no checkpoints",
    "zip://a.zip::s3://bucket": "takes no checkpoints",
    "s3://": "is no plain address",
    "s3:///folder": "is no plain address",
    "s3://bucket//folder": "is no plain address",
    "s3://bucket/../other": "is no plain address",
    "s3://bucket/fol\nder": "is no plain address",
    "s3://bucket/folder ": "is no plain address",
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


def test_a_protocol_that_no_package_knows_is_refused():
    with pytest.raises(ConfigError, match="no installed package knows nosuch://"):
        check_installed("checkpoint.folder", "nosuch://bucket")


def test_a_store_of_one_process_is_refused():
    """A run there was done, and had no checkpoint."""
    with pytest.raises(
        ConfigError, match="memory://bucket: is a store that each process has for itself: .*leave it out"
    ):
        check_installed("checkpoint.folder", "memory://bucket")


def test_the_parts_of_an_address():
    path = place_of("s3://bucket/a/step-00000008/")
    assert isinstance(path, StorePath)
    assert (path.name, str(path.parent), str(path / "x")) == ("step-00000008", "s3://bucket/a", f"{path}/x")
    assert str(path.with_name("y.part")) == "s3://bucket/a/y.part"
    assert (path.with_name("y.part").stem, path.protocol) == ("y", "s3")
    assert not is_address("runs/a:b")
    assert not is_address("C:\\x")
