"""`titanlab import`: a folder of torch.distributed.checkpoint, as torchtitan and other tools save one; names, folders."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.weights.huggingface import made as folders
from titanlab.__main__ import main
from titanlab.cli.weights import option_name
from titanlab.recipe import as_typed
from titanlab.techniques.model.llama_schema import Llama
from titanlab.train import is_weights
from titanlab.train.weights import open_weights

SIZES = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "vocab_size": 96}
MODEL = ["--model", "debug", *(f"model.{key}={value}" for key, value in SIZES.items())]


def saved(folder, prefix, **other):
    """Saves random weights as another tool would, and returns them."""
    generator = torch.Generator().manual_seed(5)
    shapes = Llama(**SIZES).account().parameters
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    named = {f"{prefix}{name}": weight for name, weight in weights.items()}
    dcp.save({**named, **other}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return weights


@pytest.fixture(autouse=True)
def _alone(recwarn):
    """DCP warns that there is no process group."""
    yield
    recwarn.clear()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("prefix", ["", "model."])
def test_weights_of_another_tool_are_imported(tmp_path, shown, prefix):
    # What else a checkpoint of torchtitan has.
    other = {"optimizer": {"state": {"norm.weight": {"step": torch.ones(())}}}, "train_state": {"step": 7}}
    weights = saved(tmp_path / "theirs", prefix, **other)
    into = tmp_path / "ours"
    assert f"init_from={into}" in shown(
        "import", str(tmp_path / "theirs"), *MODEL, "--into", str(into), "--name", "mine"
    )
    source = open_weights(into, "init_from")
    assert source.model == Llama(**SIZES)
    for name, weight in weights.items():
        assert torch.equal(source.read(name, [0] * weight.ndim, weight.shape), weight)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ([], "--model=null: is not given"),
        (["--model", "no_such"], "model=no_such"),
        ([*MODEL, "model.dim=64"], "is [96, 32] there and [96, 64] in the model"),
        ([*MODEL, "model.layers=3"], "has no plain tensor layers.2"),
        ([*MODEL, "data.x=3"], "is not a key of the model"),
    ],
)
def test_another_model_is_refused_in_one_line(tmp_path, capsys, model, said):
    saved(tmp_path / "theirs", "")
    assert main(["import", str(tmp_path / "theirs"), *model, "--into", str(tmp_path / "ours"), "--name", "mine"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert not (tmp_path / "ours").exists()


def test_a_folder_without_the_model_says_what_it_has(tmp_path, capsys):
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"bert.weight": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"), no_dist=True)
    assert main(["import", str(tmp_path / "theirs"), *MODEL, "--into", str(tmp_path / "ours"), "--name", "mine"]) == 2
    assert "it has bert.weight" in capsys.readouterr().err


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_folder_that_would_run_code_is_refused(tmp_path, capsys):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "run")))
    assert main(["import", str(theirs), *MODEL, "--into", str(tmp_path / "ours"), "--name", "mine"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_missing_data_has_a_hint_that_fits_a_folder_of_another_tool(tmp_path, capsys):
    theirs = tmp_path / "theirs"
    saved(theirs, "")
    for path in theirs.glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:100])
    assert main(["import", str(theirs), *MODEL, "--into", str(tmp_path / "ours"), "--name", "mine"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith(f"error: source={theirs}: cannot be read (")
    assert err.endswith("; give another checkpoint, or a whole copy of this one\n")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("/x/My Model (v2)", "my_model_v2"),
        ("/x/null", "null_imported"),
        ("/x/1e5", "1e5"),
        ("/x/007", "007"),
        ("/x/???", "model"),
        ("org/llama3_8b", "llama3_8b_imported"),
    ],
)
def test_the_name_is_that_of_the_source_unless_it_cannot_be_chosen(source, name):
    found = option_name(None, source)
    assert found == name
    override = OverridesParser.create().parse_override(as_typed(f"model={found}"))
    assert override.value() == found


def test_a_home_folder_is_that_of_the_user(tmp_path, monkeypatch, capsys):
    """Bash leaves the ~ of --into=~/x as it is."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    theirs = folders.folder(tmp_path / "hub")
    assert main(["import", str(theirs), "--into=~/ours"]) == 0
    assert is_weights(tmp_path / "home" / "ours")
    assert f"init_from={tmp_path}/home/ours" in capsys.readouterr().out
    assert main(["export", "~/ours", "--into=~/theirs"]) == 0
    assert (tmp_path / "home" / "theirs" / "config.json").is_file()
    assert f"from_pretrained('{tmp_path}/home/theirs')" in capsys.readouterr().out
    assert not (tmp_path / "~").exists()
