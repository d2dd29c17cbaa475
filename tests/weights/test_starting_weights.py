"""What a run starts with: the folder is of its model, its fingerprint is of its content, and its biases go along."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

from tests import tiny
from tests.checkpoint.one_process import ALONE
from tests.refusals import refusal
from tests.weights import saved
from tests.weights.huggingface import made as folders
from titanlab.techniques.model.llama_schema import Llama, Mixtral
from titanlab.train import check_beginning, not_read, start_fingerprint
from titanlab.train import starting_weights as module
from titanlab.train.starting_weights import fill_start

SIZES = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 96, "vocab_size": 256}
BIASED = Mixtral(**SIZES, experts=4, active_experts=2, balance="bias")
BIASES = {"layers.0": [0.0, 0.1, -0.2, 0.0], "layers.1": [0.0, 0.0, 0.3, 0.0]}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def theirs(folder, **config):
    """A recipe that starts with a folder of Hugging Face's, and the folder."""
    path = folders.folder(folder / "hub", {**folders.SMALL, **config})
    model = Llama.hugging_face().from_hf({**folders.SMALL, **config})
    return tiny.recipe(folder / "runs", model=model, init_from=str(path)), path


@pytest.fixture
def run(tmp_path):
    """A run with one checkpoint, and a recipe of the same model."""
    recipe, run = saved.run_of(tmp_path / "runs")
    saved.save(run, recipe.model)
    return recipe, run


def test_a_model_of_another_kind_is_refused(tmp_path):
    recipe, path = theirs(tmp_path)
    said = refusal(check_beginning, replace(recipe, model=BIASED))
    assert said.startswith(f"init_from={path}: is a model of another kind: llama, and the recipe's is mixtral; ")


def test_the_run_is_found_from_within_its_folder_and_by_a_link(run, tmp_path, monkeypatch):
    """Its config.yaml was not, and another model with the same shapes was taken."""
    recipe, begun = run
    (tmp_path / "good").symlink_to(begun.checkpoints / "step-00000001")
    monkeypatch.chdir(begun.checkpoints)
    for text in ("step-00000001", str(tmp_path / "good")):
        other = replace(recipe, init_from=text, model=replace(recipe.model, norm_eps=1e-6))
        assert "is of another model: norm_eps is 1e-05 there and 1e-06 here" in refusal(check_beginning, other)


def test_a_checkpoint_outside_of_a_run_is_judged_by_its_shapes(run, tmp_path):
    recipe, begun = run
    alone = tmp_path / "a" / "b" / "step-00000001"
    shutil.copytree(begun.checkpoints / "step-00000001", alone)
    # Without a config.yaml nobody knows the eps.
    check_beginning(replace(recipe, init_from=str(alone), model=replace(recipe.model, norm_eps=1e-6)))
    other = replace(recipe, init_from=str(alone), model=replace(recipe.model, ffn_dim=100))
    assert "is 192×64 there and 100×64 here" in refusal(check_beginning, other)


def test_the_fingerprint_of_a_checkpoint_stays_the_same_in_later_versions(run):
    """It is part of the identity of runs that have begun."""
    recipe, begun = run
    (file,) = json.loads((begun.checkpoints / "step-00000001" / "index.json").read_bytes())["files"]
    numbers = np.frombuffer(base64.b64decode(file["checksums"]), "<u8").tolist()
    text = f"{file['name']}/{file['bytes']}/{','.join(map(str, numbers))};"
    found = start_fingerprint(replace(recipe, init_from=str(begun.path)))
    assert found == hashlib.sha256(text.encode()).hexdigest()


def test_a_large_file_is_sampled_from_its_first_byte_to_its_last(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LARGE_BYTES", 1000)
    monkeypatch.setattr(module, "_SAMPLE_BYTES", 10)
    path = tmp_path / "large"
    content = bytes(2000)
    path.write_bytes(content)
    first = module._sampled([path])
    for place in (0, 9, 1990, 1999):
        path.write_bytes(content[:place] + b"x" + content[place + 1 :])
        assert module._sampled([path]) != first, place
    # Between two samples nothing is read: that is the price.
    path.write_bytes(content[:20] + b"x" + content[21:])
    assert module._sampled([path]) == first
    path.write_bytes(content + b"\0")
    assert module._sampled([path]) != first


def test_a_pipe_among_the_files_of_a_dcp_folder_does_not_stop_the_fingerprint(run, monkeypatch):
    """To open it would wait for a writer."""
    recipe, begun = run
    checkpoint = begun.checkpoints / "step-00000001"
    (checkpoint / "__0_0.distcp").write_bytes(b"numbers")
    monkeypatch.setattr(module, "has_pickle", lambda place: True)
    recipe = replace(recipe, init_from=str(begun.path))
    first = start_fingerprint(recipe)
    os.mkfifo(checkpoint / "__1_0.distcp")
    (checkpoint / "__2_0.distcp").mkdir()
    assert start_fingerprint(recipe) == first
    (checkpoint / "__0_0.distcp").write_bytes(b"others")
    assert start_fingerprint(recipe) != first


@pytest.mark.parametrize(
    ("before", "after", "given"),
    [
        ("bias", "bias", BIASES),
        ("bias", "none", {}),
        # The state of another balance is not a bias.
        ("auxiliary_batch", "bias", {}),
    ],
)
def test_biases_go_along_where_both_models_have_them(tmp_path, before, after, given):
    first, second = (replace(BIASED, balance=balance) for balance in (before, after))
    recipe, begun = saved.run_of(tmp_path / "runs", model=first)
    saved.save(begun, first, routing=BIASES)
    model = saved.module(second, seed=1)
    assert fill_start(replace(recipe, model=second, init_from=str(begun.path)), model, ALONE) == given


def test_an_older_field_of_the_model_may_be_absent_in_the_run_s_config(run):
    """A field with a default may be younger than the run."""
    recipe, begun = run
    text = (begun.path / "config.yaml").read_text()
    assert "attention:" in text
    kept = [line for line in text.splitlines(keepends=True) if not line.startswith("  attention:")]
    (begun.path / "config.yaml").write_text("".join(kept))
    check_beginning(replace(recipe, init_from=str(begun.path)))


@pytest.fixture
def both(run, tmp_path):
    """Recipes that start with a run and with a folder of Hugging Face's."""
    recipe, begun = run
    return [replace(recipe, init_from=str(begun.path)), theirs(tmp_path / "theirs")[0]]


def test_what_is_left_out_keeps_its_initial_value(both):
    patterns = ("output", "layers.1", "attention.w[kv]")
    left_out = ("output.weight", "layers.1.", ".attention.wk.", ".attention.wv.")
    for recipe in both:
        model, initial = saved.module(recipe.model, seed=1), saved.module(recipe.model, seed=1)
        check_beginning(replace(recipe, init_from_exclude=patterns))
        fill_start(replace(recipe, init_from_exclude=patterns), model, ALONE)
        begun = saved.module(recipe.model, seed=1)
        fill_start(recipe, begun, ALONE)
        for name, parameter in model.named_parameters():
            source = initial if any(part in name for part in left_out) else begun
            assert parameter.equal(source.get_parameter(name)), name
            assert not begun.get_parameter(name).equal(initial.get_parameter(name)) or "norm" in name


def test_a_line_names_what_is_left_out(both):
    for recipe in both:
        (line,) = not_read(replace(recipe, init_from_exclude=("output", "norm")))
        assert line == f"not read from {recipe.init_from}, but made by the seed: norm.weight, output.weight"
        assert "3 more" not in line
        assert " more" in not_read(replace(recipe, init_from_exclude=("layers.*",)))[0]


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (("output", "ouptut"), "=ouptut: names no parameter of the model; try output"),
        (("layers.7",), "=layers.7: names no parameter of the model; "),
        (("",), "=: names no parameter of the model; "),
        (("*",), ": names all parameters of the model; leave some of them out"),
    ],
)
def test_a_pattern_that_fits_nothing_or_all_is_refused(both, patterns, said):
    for recipe in both:
        assert said in refusal(check_beginning, replace(recipe, init_from_exclude=patterns))
    alone = replace(both[0], init_from=None, init_from_exclude=patterns)
    assert "leaves weights of init_from out, which is not given" in refusal(check_beginning, alone)


def test_another_vocabulary_needs_embedding_and_head_left_out(both):
    for recipe in both:
        larger = replace(recipe, model=replace(recipe.model, vocab_size=320))
        other = "of another model"
        assert other in refusal(check_beginning, larger)
        assert other in refusal(check_beginning, replace(larger, init_from_exclude=("output",)))
        chosen = replace(larger, init_from_exclude=("output", "tok_embeddings"))
        check_beginning(chosen)
        model = saved.module(larger.model, seed=1)
        fill_start(chosen, model, ALONE)
        norms = replace(chosen, model=replace(larger.model, norm_eps=1e-3))
        assert "norm_eps" in refusal(check_beginning, norms)


def test_a_router_that_is_left_out_begins_without_a_bias(tmp_path):
    recipe, begun = saved.run_of(tmp_path / "runs", model=BIASED)
    saved.save(begun, BIASED, routing=BIASES)
    chosen = replace(recipe, init_from=str(begun.path), init_from_exclude=("layers.0.feed_forward.router",))
    given = fill_start(chosen, saved.module(BIASED, seed=1), ALONE)
    assert given == {"layers.0": [0.0] * 4, "layers.1": BIASES["layers.1"]}
