"""Configs of trackers: found, light, and refused with a cure."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.techniques.tracker.trackers_schema import TensorBoard

CONF = Path(__file__).parents[2] / "conf" / "tracker"


def test_every_kind_is_found_and_has_its_yaml():
    kinds = discover()["tracker"]
    assert sorted(str(kind) for kind in kinds) == ["jsonl", "tensorboard", "wandb"]
    assert sorted(path.stem for path in CONF.glob("*.yaml")) == sorted(str(kind) for kind in kinds)


@pytest.mark.parametrize("kind", ["jsonl", "tensorboard", "wandb"])
def test_a_yaml_names_its_schema_and_only_fields_that_are_there(kind):
    values = yaml.safe_load((CONF / f"{kind}.yaml").read_text())
    assert values.pop("defaults") == [f"{kind}_schema", "_self_"]
    schema = discover()["tracker"][kind].schema
    assert schema(**values) == schema()


def test_a_flush_takes_time():
    with pytest.raises(ConfigError, match=r"^tracker\.flush_seconds=0"):
        TensorBoard(flush_seconds=0)


def test_no_tracker_imports_what_it_tracks_with():
    modules = "trackers_schema tensorboard wandb wandb_writer contract".split()
    code = (
        f"import importlib, sys\nfor name in {modules}: importlib.import_module('titanlab.techniques.tracker.' + name)\n"
        "print([name for name in ('torch', 'wandb', 'tensorboard') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
