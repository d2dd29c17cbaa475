"""Files are read once, and schemas converted once."""

import copy
import os

import pytest
from hydra.core.config_store import ConfigStore
from hydra.plugins.config_source import ConfigLoadError

from titanlab.errors import ConfigError
from titanlab.recipe import register
from titanlab.recipe.hydra_internal import FileConfigSource, StructuredConfigSource


def test_a_file_is_read_again_when_it_has_changed(tmp_path):
    file = tmp_path / "fast.yaml"
    file.write_text("steps: 3\n")
    first = FileConfigSource("mine", f"file://{tmp_path}").load_config("fast").config
    assert first == {"steps": 3}
    # What Hydra does with the content does not reach the next reader.
    first.steps = 4
    assert FileConfigSource("mine", f"file://{tmp_path}").load_config("fast").config == {"steps": 3}
    file.write_text("steps: 50\n")
    assert FileConfigSource("mine", f"file://{tmp_path}").load_config("fast").config == {"steps": 50}
    # As `cp -p` and archives leave it: the same size and time.
    before = file.stat()
    other = tmp_path / "other.yaml"
    other.write_text("steps: 60\n")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(file)
    assert FileConfigSource("mine", f"file://{tmp_path}").load_config("fast").config == {"steps": 60}


def test_a_file_that_is_gone_is_an_error(tmp_path):
    file = tmp_path / "fast.yaml"
    file.write_text("steps: 3\n")
    source = FileConfigSource("mine", f"file://{tmp_path}")
    source.load_config("fast")
    file.unlink()
    with pytest.raises(ConfigLoadError, match=r"Config not found : .*fast\.yaml"):
        source.load_config("fast")


def test_a_schema_is_converted_once_also_in_a_copy_of_its_source():
    register()
    source = copy.deepcopy(StructuredConfigSource("mine", "structured://"))
    first = source.load_config("optimizer/adamw_schema").config
    converted = ConfigStore.instance().repo["optimizer"]["adamw_schema.yaml"].node
    assert converted == first
    # What Hydra does with the config does not reach the next reader.
    first.lr = 0.125
    assert source.load_config("optimizer/adamw_schema").config == converted != first
    assert ConfigStore.instance().repo["optimizer"]["adamw_schema.yaml"].node is converted


@pytest.mark.parametrize("content", ["- a\n- b\n", "5\n", "1.5\n"])
def test_a_file_without_keys_is_told_in_a_line(tmp_path, content):
    file = tmp_path / "fast.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=f"^file={file}: has no keys with values"):
        FileConfigSource("mine", f"file://{tmp_path}").load_config("fast")
