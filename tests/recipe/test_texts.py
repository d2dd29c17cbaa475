"""What is text by its type is the text as typed: on the command line, in YAMLs, in sweeps, and when a run goes on."""

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from tests.sweep.files import plan, write_sweep
from titanlab.cli.compose import compose
from titanlab.recipe import Loader, Recipe, as_typed, from_mapping, literal, path_override, read_flags, to_mapping
from titanlab.recipe.next_attempt import overridden
from titanlab.records import config_text, read_config
from titanlab.sweep import read_request

# YAML or Hydra, or both, read each of these as a number or a truth value.
TYPED = ["5e2", "1_000", "017", "12:00:00", "1e5", "-0", "off", "true", "FALSE", "NaN", "-.INF", "2026-01-01"]


def composed(*arguments: str) -> Recipe:
    flags = read_flags(arguments)
    recipe = Loader(flags, flags.overrides).recipe()
    assert recipe is not None
    return recipe


def from_file(folder, group: str, text: str, *overrides: str) -> Recipe:
    (folder / group).mkdir()
    (folder / group / "mine.yaml").write_text(text)
    return composed(f"--config-dir={folder}", f"{'+' * (group == 'recipe')}{group}=mine", *overrides)


def texts(recipe: Recipe) -> tuple:
    launch = recipe.launch
    return recipe.name, launch.partition, launch.preamble, launch.environment["X"], recipe.tracker.tags


# In `make test`: a number, a truth value, and a date.
QUICK = ("5e2", "off", "2026-01-01")


@pytest.mark.parametrize(
    "text", [pytest.param(text, marks=[] if text in QUICK else [pytest.mark.full]) for text in TYPED]
)
def test_a_text_is_the_text_as_typed_through_every_door(tmp_path, text):
    expected = (text, text, (text, "a"), text, (text,))
    groups = "launch=slurm", "tracker=wandb"
    overrides = [f"name={text}", f"launch.partition={text}", f"launch.preamble=[{text},a]", f"tracker.tags=[ {text} ]"]
    recipe = composed(*groups, *overrides, f"+launch.environment.X={text}")
    assert texts(recipe) == expected
    plain = overridden(to_mapping(composed(*groups)), [*overrides, f"launch.environment.X={text}"], file=tmp_path)
    assert texts(plain) == expected
    file = (
        "# @package _global_\n"
        "defaults: [quickstart, {override /launch: slurm}, {override /tracker: wandb}]\n"
        f"name: {text}\n"
        f"launch: {{partition: {text}, preamble: [{text}, a], environment: {{X: {text}}}}}\n"
        f"tracker:\n  tags:\n  - {text}\n"
    )
    assert texts(from_file(tmp_path, "recipe", file)) == expected
    # As a run keeps it.
    path = tmp_path / "config.yaml"
    path.write_text(config_text(to_mapping(recipe)), encoding="utf-8")
    assert from_mapping(read_config(path)) == recipe


def test_a_flag_of_sbatch_has_the_text_as_typed_and_is_left_out_by_false_and_null(tmp_path):
    expected = {f"x{place}": text for place, text in enumerate(TYPED)}
    expected |= {key: text == "true" for key, text in expected.items() if text.lower() in ("true", "false")}
    expected["z"] = None
    given = ", ".join(f"x{place}: {text}" for place, text in enumerate(TYPED))
    recipe = composed("launch=slurm", f"+launch.extra={{{given}, z: null}}")
    assert recipe.launch.extra == expected
    file = f"defaults: [slurm_schema, _self_]\nextra: {{{given}, z: null}}\nminutes: 1_0\n"
    recipe = from_file(tmp_path, "launch", file)
    assert (recipe.launch.extra, recipe.launch.minutes) == (expected, 10)


def test_the_name_of_a_variable_is_text_too_and_so_is_what_is_merged(tmp_path):
    file = "defaults: [slurm_schema, _self_]\nenvironment: {on: off, NO: 1}\n<<: {extra: {x: 1e3}, minutes: 5}\n"
    launch = from_file(tmp_path, "launch", file).launch
    assert (launch.environment, launch.extra, launch.minutes) == ({"on": "off", "NO": "1"}, {"x": "1e3"}, 5)


@pytest.mark.parametrize(
    ("typed", "given"),
    [
        ("name=5e2,1_000,a", "name='5e2','1_000',a"),
        ("name= 5e2 ", "name= '5e2'"),
        ("++name=choice(5e2, a, 'b')", "++name=choice('5e2', a, 'b')"),
        ("name=tag(x,shuffle([1e3]))", "name=tag(x,shuffle(['1e3']))"),
        ("launch={extra: {a: 1e3}, minutes: 5}", "launch={extra: {a: '1e3'}, minutes: 5}"),
        ("tracker.wandb.tags=[1]", "tracker.wandb.tags=['1']"),
        ("model=1e5,debug", "model='1e5',debug"),
        ("+recipe=2026", "+recipe='2026'"),
    ],
)
def test_numbers_of_a_text_get_quotes(typed, given):
    assert as_typed(typed) == given


@pytest.mark.parametrize(
    "typed",
    [
        *("name=range(1,4)", "name='5e2'", 'name="5e2"', "name=${seed}", "name=a5e2", "name=null", "name=", "~name=5"),
        *("optimizer.lr=5e-4", "training.steps=1_000", "training.loss_parallel=true", "launch.minutes=5", "model=null"),
        *("optimizer={lr: 1e-3}", "=3", "name", "name=[", "name='", "optimizer.betas=[0.9,0.95]", "unknown=5e2"),
        *(r"name=a\,5", r"name=a\:5", r"name=a\(5\)"),
    ],
)
def test_everything_else_stays_as_it_is(typed):
    assert as_typed(typed) == typed


def test_null_numbers_truth_values_and_references_are_read_as_before(tmp_path):
    file = (
        "# @package _global_\ndefaults: [quickstart, _self_]\ninit_from: null\nseed: 017\nname: ${model.kind}\n"
        "optimizer: {lr: 5e-4}\ntraining: {steps: 1_000}\ncheckpoint: {load_from: ~}\n"
    )
    recipe = from_file(tmp_path, "recipe", file, "checkpoint.last_dtype=null", "parallelism.loss_parallel=false")
    assert (recipe.init_from, recipe.checkpoint.load_from, recipe.checkpoint.last_dtype) == (None, None, None)
    assert (recipe.seed, recipe.optimizer.lr, recipe.training.steps) == (17, 5e-4, 1000)
    assert (recipe.name, recipe.parallelism.loss_parallel) == (recipe.model.kind, False)


@pytest.mark.parametrize(
    ("text", "number"),
    [("017", 17), *(pytest.param(*row, marks=pytest.mark.full) for row in [("+0_17", 17), ("00", 0)])],
)
def test_a_number_with_a_leading_zero_is_decimal_in_a_file_as_on_the_command_line(tmp_path, text, number):
    file = f"# @package _global_\ndefaults: [quickstart, _self_]\nseed: {text}\n"
    recipe = from_file(tmp_path, "recipe", file)
    assert (recipe.seed, composed(f"seed={text}").seed) == (number, number)


def test_an_option_may_have_the_name_of_a_number(tmp_path):
    (tmp_path / "model").mkdir()
    for layers, name in enumerate(("1e5", "off", "5"), 1):
        (tmp_path / "model" / f"{name}.yaml").write_text(f"defaults: [debug, _self_]\nlayers: {layers}\n")
        assert composed(f"--config-dir={tmp_path}", f"model={name}").model.layers == layers
    text = "# @package _global_\ndefaults: [quickstart, {override /model: 1e5}, {override /checkpoint: off}, _self_]\n"
    recipe = from_file(tmp_path, "recipe", text)
    assert (recipe.model.layers, recipe.checkpoint.kind) == (1, "off")


def test_a_sweep_has_its_texts_as_typed(tmp_path):
    request = read_request(["name=5e2,1_000", "seed=1,2"])
    assert request.space == {"product": {"name": ["5e2", "1_000"], "seed": [1, 2]}}
    points = "{checkpoint: off, name: 017, seed: 017}, {checkpoint: sync, name: 1_0, seed: 3}"
    text = (
        "# @package _global_\ndefaults: [{override /data: synthetic}, {override /hydra/sweeper: space}]\n"
        f"training: {{steps: 3}}\nhydra: {{mode: MULTIRUN, sweeper: {{space: {{list: [{points}]}}}}}}\n"
    )
    recipes = [each.recipe for each in plan(*write_sweep(tmp_path, text)).planned]
    found = [(recipe.name, recipe.checkpoint.kind, recipe.seed) for recipe in recipes]
    assert found == [("017", "off", 17), ("1_0", "sync", 3)]


# Lists of options: on the command line, in a recipe's file, in a sweep and in a frozen recipe


TINY = "model=llama_2m data=synthetic"


def test_on_the_command_line():
    given = f"{TINY} tracker=[wandb,tensorboard] tracker.wandb.project=mine tracker.tensorboard.flush_seconds=3"
    (recipe,) = compose(given.split())
    assert (recipe.tracker.kind, recipe.tracker.wandb.project) == ("wandb+tensorboard", "mine")
    assert recipe.tracker.tensorboard.flush_seconds == 3
    # One option has its keys where it always had them.
    for one in ("tracker=wandb", "tracker=[wandb]"):
        (recipe,) = compose(f"{TINY} {one} tracker.project=mine".split())
        assert (recipe.tracker.kind, recipe.tracker.project) == ("wandb", "mine")


@pytest.fixture
def own(tmp_path):
    """A folder of options of the user's own."""
    for group in ("recipe", "tracker"):
        (tmp_path / group).mkdir()
    (tmp_path / "tracker" / "mine.yaml").write_text("defaults: [wandb_schema, _self_]\nproject: mine\n")
    top = "# @package _global_\ndefaults:\n  - override /model: llama_2m\n  - override /data: synthetic\n"
    (tmp_path / "recipe" / "two.yaml").write_text(
        f"{top}  - override /tracker: [mine, tensorboard]\ntracker: {{tensorboard: {{flush_seconds: 2}}}}\n"
    )
    return tmp_path


def test_in_files(own):
    (recipe,) = compose(["--config-dir", str(own), "+recipe=two", "tracker.mine.entity=us"])
    parts = recipe.tracker.parts()
    assert {name: part.kind for name, part in parts.items()} == {"mine": "wandb", "tensorboard": "tensorboard"}
    assert (parts["mine"].project, parts["mine"].entity, parts["tensorboard"].flush_seconds) == ("mine", "us", 2)
    # A frozen recipe takes keys too, as `titanlab resume` gives them.
    again = overridden(to_mapping(recipe), ["tracker.mine.mode=offline"], file=own)
    assert (again.tracker.mine.mode, again.tracker.kind) == ("offline", "mine+tensorboard")


def test_in_sweeps():
    recipes = compose([*TINY.split(), "-m", "tracker=[wandb,tensorboard],jsonl"])
    assert [one.tracker.kind for one in recipes] == ["wandb+tensorboard", "jsonl"]


# Plain values and paths as Hydra and OmegaConf must be given them


@pytest.mark.parametrize("value", ["", "a", "${x}", "\\${x}", "\\\\${x}", "${", "a\\b", "$x", 1, None, "${a}${b}"])
def test_a_value_reads_back_unchanged(value):
    given = {"a": value, "b": [value, {"c": value}]}
    assert OmegaConf.to_container(OmegaConf.create(literal(given)), resolve=True) == given


@pytest.mark.parametrize("text", ["weights/small", "/a/@b/+c", "./-x/y", "x/1e3", "a%20b/c"])
def test_a_usual_path_has_no_quotes(text):
    assert path_override("k", Path(text)) == f"k={Path(text)}"


@pytest.mark.parametrize(
    "text",
    [
        # Words that Hydra reads as another value, or as none.
        *("123", "1e3", "1_000", "null", "true", "inf", "/", ".", "w"),
        *("модель/x", "/home/é/w", "a b/c", "a'b", 'a"b', "a\\b", "a\\", 'a\\"b', "a\nb", " a"),
        *("${x}/y", "\\${x}", "a=b", "a,b", "[x]", "{a:b}", "a:b", "~x", "a#b", "x(1)", "$HOME/x", "*/x"),
    ],
)
def test_any_path_survives_hydra_s_grammar(text):
    parsed = OverridesParser.create().parse_override(path_override("k", Path(text)))
    assert not parsed.is_sweep_override()
    assert OmegaConf.create({"k": parsed.value()}).k == str(Path(text))
