"""Files from a stranger in checkpoints, with checksums that fit: nothing is executed or read outside."""

import os
import pickle
import shutil

import pytest

from tests import tiny
from tests.checkpoint.test_damage import loaded
from titanlab.checkpoint import DamagedCheckpoint, latest, read_contents
from titanlab.checkpoint.storage import INDEX
from titanlab.cli import main
from titanlab.records import RunFolder

SHARD = "rank-00000.safetensors"


@pytest.fixture(scope="module")
def trained_run(pool, tmp_path_factory):
    """A run of two steps that has saved one checkpoint."""
    made = tiny.recipe(tmp_path_factory.mktemp("saved"), steps=2)
    run = tiny.begin(made)
    pool.run(1, loaded, made, run)
    (run.path / "result.json").unlink()
    return made, run


@pytest.fixture
def copied(trained_run, tmp_path):
    made, run = trained_run
    return made, RunFolder(shutil.copytree(run.path, tmp_path / "runs" / run.path.parent.name / run.path.name))


@pytest.fixture
def checkpoint(copied):
    return latest(copied[1].checkpoints)


class Payload:
    """Unpickled, it touches a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("name", ["more.pkl", "__0_0.distcp", ".metadata"])
def test_beside_an_index_no_other_file_is_looked_at(checkpoint, tmp_path, name):
    (checkpoint / name).write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    assert read_contents(checkpoint, "run").saved.step == 2
    assert not (tmp_path / "ran").exists()


VERBS = ["resume", "export", "init_from", "checkpoint.load_from", "checkpoints"]


@pytest.mark.parametrize(
    ("verb", "name"), [*((verb, SHARD) for verb in VERBS), ("resume", INDEX), ("init_from", "position.json")]
)
def test_a_pickle_in_the_place_of_a_file_runs_nothing(copied, checkpoint, tmp_path, capsys, name, verb):
    made, run = copied
    ran = tmp_path / "ran"
    (checkpoint / name).write_bytes(pickle.dumps(Payload(ran)))
    new = ["train", "model=debug", "data=synthetic", "cluster=cpu", f"runs={tmp_path / 'new'}"]
    new += [f"model.{key}={getattr(made.model, key)}" for key in ("dim", "layers", "heads", "kv_heads", "ffn_dim")]
    new += [f"model.vocab_size={made.model.vocab_size}", f"data.vocab_size={made.model.vocab_size}"]
    arguments = {
        "resume": ["resume", str(run.path)],
        "export": ["export", str(run.path), "--into", str(tmp_path / "out")],
        "init_from": [*new, f"init_from={run.path}"],
        "checkpoint.load_from": [*new, f"checkpoint.load_from={run.path}"],
        "checkpoints": ["checkpoints", str(run.path)],
    }[verb]
    assert main(arguments) == (1 if verb == "checkpoints" else 2)
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == (0 if verb == "checkpoints" else 1)
    assert name in said.out + said.err
    assert not any((tmp_path / made).exists() for made in ("ran", "new", "out"))


@pytest.mark.parametrize("name", [INDEX, "position.json"])
def test_a_symbolic_link_out_of_the_folder_is_not_followed(checkpoint, tmp_path, name):
    outside = tmp_path / "outside"
    shutil.move(checkpoint / name, outside)
    (checkpoint / name).symlink_to(outside)
    with pytest.raises(DamagedCheckpoint, match=f"^run=.*its file {name} is a symbolic link; give another"):
        read_contents(checkpoint, "run")
