"""The sources from which Hydra reads configs: a file is read once, and again when it has changed."""

import pytest
from hydra.plugins.config_source import ConfigLoadError

from titanlab.recipe.composition.hydra_internal import FileConfigSource


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


def test_a_file_that_is_gone_is_an_error(tmp_path):
    file = tmp_path / "fast.yaml"
    file.write_text("steps: 3\n")
    source = FileConfigSource("mine", f"file://{tmp_path}")
    source.load_config("fast")
    file.unlink()
    with pytest.raises(ConfigLoadError, match=r"Config not found : .*fast\.yaml"):
        source.load_config("fast")
