"""position.json: what no run saves is told in one line, before anything starts."""

import json

import pytest

from titanlab.checkpoint import Position, check_files, check_progress, read_position
from titanlab.errors import ConfigError

WHOLE = {
    "step": 3,
    "tokens": 90,
    "data": {"samples": 12},
    "tracker": None,
    "layout": {"shard": 2},
    "loss_scale": {"scale": 2.0},
    "parameters": {"a.weight": [2, 3]},
    "files": {"__0_0.distcp": 7},
}


def written(folder, **changed):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "position.json").write_text(json.dumps({**WHOLE, **changed}))
    return folder


def test_a_whole_one_is_read(tmp_path):
    saved = read_position(written(tmp_path / "step-00000003"), "run", cure="c")
    assert saved.position == Position(
        step=3, tokens=90, data={"samples": 12}, layout={"shard": 2}, loss_scale={"scale": 2.0}
    )
    assert (saved.parameters, saved.files) == ({"a.weight": [2, 3]}, {"__0_0.distcp": 7})


def test_one_of_an_earlier_version_has_no_sizes_of_files(tmp_path):
    (tmp_path / "position.json").write_text(json.dumps({"step": 3, "parameters": {}}))
    assert read_position(tmp_path, "run", cure="c").files == {}


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"step": 90}, "its position.json is of step 90, and the folder's name says 3"),
        ({"step": -3}, "has step: Expected `int` >= 0"),
        ({"step": 3.0}, "has step: Expected `int`, got `float`"),
        ({"step": True}, "has step: Expected `int`, got `bool`"),
        ({"step": "3"}, "has step: Expected `int`, got `str`"),
        ({"step": 10**30}, "has step: Expected `int` <= "),
        ({"tokens": -1}, "has tokens: Expected `int` >= 0"),
        ({"tokens": float("nan")}, "is no JSON (JSON is malformed"),
        ({"data": [1]}, "has data: Expected `object`, got `array`"),
        ({"tracker": 3}, "has tracker: Expected `str | null`, got `int`"),
        ({"layout": {"shard": "2"}}, "has layout[...]: Expected `int`, got `str`"),
        ({"loss_scale": {"scale": "2"}}, "has loss_scale[...]: Expected `int | float`, got `str`"),
        ({"loss_scale": {"scale": 0.0}}, "its scale must be a factor that float32 has"),
        ({"loss_scale": {"scale": -5.0}}, "its scale must be a factor that float32 has"),
        ({"loss_scale": {"scale": 1e-300}}, "its scale must be a factor that float32 has"),
        ({"loss_scale": {"scale": 10**400}}, "has loss_scale[...]: "),
        ({"loss_scale": {"scale": True}}, "has loss_scale[...]: Expected `int | float`, got `bool`"),
        ({"loss_scale": {"scale": 2.0, "good": 2**70}}, "has loss_scale[...]: Expected `int` <= "),
        ({"parameters": {"a": 3}}, "has parameters[...]: Expected `array`, got `int`"),
        ({"files": {"../../secret": 3}}, "Expected `str` matching regex"),
        ({"later": 1}, "does not fit (Object contains unknown field `later`)"),
    ],
    ids=str,
)
def test_what_no_run_saves_is_refused(tmp_path, changed, rule):
    with pytest.raises(ConfigError) as refused:
        read_position(written(tmp_path / "step-00000003", **changed), "run", cure="the cure")
    assert rule in str(refused.value)
    assert str(refused.value).endswith("; the cure")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("key", ["loss_scale", "routing"])
def test_a_number_that_json_reads_as_infinite_is_refused(tmp_path, key):
    folder = written(
        tmp_path / "step-00000003", **{key: {"scale": "x"} if key == "loss_scale" else {"layers.0": ["x"]}}
    )
    text = (folder / "position.json").read_text()
    (folder / "position.json").write_text(text.replace('"x"', "1e400"))
    with pytest.raises(ConfigError, match=f"has {key}.*: Number out of range"):
        read_position(folder, "run", cure="c")


def test_a_folder_that_a_person_has_named_may_be_of_any_step(tmp_path):
    assert read_position(written(tmp_path / "best"), "run", cure="c").position.step == 3


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"step": 15, "tokens": 0}, "is of step 15, and the run has 14 steps"),
        ({"tokens": 97}, "has tokens=97, and 3 steps of this run have 96 at most"),
        ({"data": {"samples": 13}}, "has data.samples=13, and 3 steps of this run take 12"),
        ({"data": {"samples": 8}}, "has data.samples=8, and 3 steps of this run take 12"),
        ({"data": {"samples": 17}}, "has data.samples=17, and 3 steps of this run take 12"),
        ({"data": {}}, "has no position in the data"),
    ],
    ids=str,
)
def test_a_run_s_own_checkpoint_stands_where_its_recipe_can_stand(tmp_path, given, rule):
    about = {"steps": 14, "tokens_per_step": 32, "global_batch": 4, "checkpoint": tmp_path, "key": "run", "cure": "c"}
    good = {"step": 3, "tokens": 90, "data": {"samples": 12}}
    check_progress(Position(**good), **about)
    check_progress(Position(), **about)
    # A rollback has left out the samples of two steps.
    check_progress(Position(**{**good, "data": {"samples": 20}}), **about)
    # A third party's data may count otherwise.
    check_progress(Position(**{**good, "data": {"offset": 5}}), **about)
    with pytest.raises(ConfigError, match=rule):
        check_progress(Position(**{**good, **given}), **about)


def test_files_have_the_sizes_that_they_were_saved_with(tmp_path):
    (tmp_path / "a").write_bytes(bytes(7))
    check_files(tmp_path, {"a": 7}, "run", cure="c")
    with pytest.raises(ConfigError, match="is damaged: its file b is missing; c"):
        check_files(tmp_path, {"a": 7, "b": 7}, "run", cure="c")
    with pytest.raises(ConfigError, match="is damaged: its file a has 7 bytes, and had 9 when it was saved; c"):
        check_files(tmp_path, {"a": 9}, "run", cure="c")
