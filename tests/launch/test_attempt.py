"""What is done before an attempt's ranks start."""

from pathlib import Path

import pytest
import tokenizers

from tests import tiny
from titanlab.data import source
from titanlab.data.files_schema import Files
from titanlab.data.tokenizers.tokenizer import load
from titanlab.launch.attempt import conclude, keep_tokenizer
from titanlab.recipe.recipe import to_mapping
from titanlab.records.identity import identify
from titanlab.records.outcome import Outcome, OutcomeKind
from titanlab.records.run_folder import create_run


@pytest.mark.parametrize("name", ["mine.json", "mine"])
def test_a_run_keeps_a_tokenizer_where_generate_and_export_look(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TITANLAB_CACHE", str(tmp_path / "cache"))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({each: place for place, each in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(tmp_path / name))
    corpus = tiny.corpus(tmp_path)
    data = Files(files=str(corpus / "*.jsonl"), tokenizer=str(tmp_path / name), validation_fraction=0.0)
    recipe = tiny.recipe(tmp_path, data=data, vocab_size=256)
    source.prepare(data, report=lambda line: None)
    run = tiny.begin(recipe)
    keep_tokenizer(run, recipe)
    assert load(run.tokenizer).fingerprint == load(Path(tmp_path / name)).fingerprint
    assert [each.name for each in run.tokenizer.iterdir()] == ["tokenizer.json"]


def test_the_step_of_an_end_is_the_last_that_anybody_knows_of(tmp_path):
    run = tiny.begin(tiny.recipe(tmp_path))
    with run.open_metrics(1) as writer:
        writer.write("train", 1, {"loss": 1.0})
    run.write_failure(Outcome(kind=OutcomeKind.HANG, step=12, rank=1, attempt=1, cause="step 13 did not end"))
    assert conclude(run, 1, {1: 71}).step == 12


def test_what_is_saved_is_noted_where_no_attempt_was_begun(tmp_path):
    recipe = tiny.recipe(tmp_path)
    identity = identify(recipe, data="tiny", hardware="cpu")
    run = create_run(recipe.runs, name="mine", identity=identity, config=to_mapping(recipe))
    run.note_saved(1, 3)
    assert run.saved_step() == 3
