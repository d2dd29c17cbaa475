"""Numbers on the pages that follow from the code: counts of recipes, of layouts, of parameters, and FLOPs."""

from __future__ import annotations

import math
import re

import pytest
from omegaconf import OmegaConf

from tests.docs.pages import CONFIGS, PAGES, commands, read
from tests.docs.test_names import options, tables
from tests.model.published import SCHEMAS
from titanlab.cli import main
from titanlab.cli.compose import compose
from titanlab.costs import training_flops_per_token
from titanlab.plan import for_planning, machine_of, most_memory, reserved_bytes
from titanlab.plan.step_time import step_time
from titanlab.recipe import conf_folder
from titanlab.sweep import plan_study


@pytest.fixture(scope="module")
def models():
    """Every model's config by its name."""
    given = {name: OmegaConf.load(conf_folder() / "model" / f"{name}.yaml") for name in options("model")}
    defaults = {name: each.pop("defaults") for name, each in given.items()}
    assert all(own == "_self_" for _, own in defaults.values())
    return {name: SCHEMAS[defaults[name][0]](**each) for name, each in given.items()}


def parameters(model):
    return sum(map(math.prod, model.account().parameters.values()))


def number(text):
    """`6,738,415,616` and `0.35 M` as numbers."""
    digits, _, unit = text.partition(" ")
    return float(digits.replace(",", "")) * {"": 1, "M": 1e6}[unit]


def fits(text, value):
    """Whether a number is rounded to the digits that a text has."""
    decimals = len(text.partition(" ")[0].partition(".")[2])
    unit = 1e6 if text.endswith(" M") else 1
    return abs(number(text) - value) <= 0.5 * unit / 10**decimals


def test_the_table_of_models_is_as_they_are(models):
    (rows,) = [rows for head, rows in tables("docs/models.md") if head[0] == "name"]
    for row in rows:
        for name in re.findall(r"`(\w+)`", row[0]):
            model = models[name]
            assert fits(row[1], parameters(model)), name
            sizes = [model.layers, model.dim, f"{model.heads}/{model.kv_heads}", model.ffn_dim]
            assert row[2] == " · ".join(map(str, sizes)), name
            assert number(row[3]) == model.vocab_size, name
            assert ("tied embeddings" in row[4]) == model.tied_embeddings, name


@pytest.mark.parametrize("config", [each for each in CONFIGS if each.startswith("conf/model/")])
def test_a_model_has_as_many_parameters_as_its_comments_say(models, config):
    model = models[config.removeprefix("conf/model/").removesuffix(".yaml")]
    comments = " ".join(line.lstrip("# ") for line in read(config).splitlines() if line.startswith("#"))
    (said,) = re.findall(r"([\d,.]+(?: M)?) parameters", comments)
    assert fits(said, parameters(model))


def test_the_readme_shows_the_quickstart_as_it_is(models):
    (shown,) = re.findall(r"titanlab · quickstart\n(.*?)```", read("README.md"), re.DOTALL)
    quickstart = OmegaConf.load(conf_folder() / "recipe" / "quickstart.yaml")
    model, training = models["llama_2m"], quickstart.training
    assert "override /model: llama_2m" in read("conf/recipe/quickstart.yaml")
    assert f"llama, {model.layers} layers of {model.dim}, vocabulary {model.vocab_size:,}" in shown
    assert f"{parameters(model):,}\n" in shown
    tokens = training.global_batch * training.seq_len
    assert f"{tokens:,} ({training.global_batch} sequences of {training.seq_len})" in shown
    flops = training_flops_per_token(model.account(), seq_len=training.seq_len)
    assert f"FLOPs per token  {flops / 1e6:.1f}M" in shown
    assert f"step {training.steps}/{training.steps} " in shown


def test_the_readme_counts_what_there_is():
    text = " ".join(read("README.md").split())
    (recipes,) = re.findall(r"(\d+) complete ones", text)
    assert int(recipes) == len([name for name in options("recipe") if name.endswith("_cpu")])
    assert int(recipes) == len(options("recipe") - {"quickstart"}) / 2
    (layouts,) = re.findall(r"\[(\d+) layouts\]\(docs/parity.md\)", text)
    assert int(layouts) == len(rows_of("docs/parity.md", "case"))
    for page in ("README.md", "docs/parallelism.md"):
        for combinations in re.findall(r"\[(\d+) combinations\]", read(page)):
            assert int(combinations) == len(rows_of("docs/techniques.md", "layout"))


def test_the_recipes_of_the_readme_are_estimated_as_it_says():
    """Rounded to three digits, so that a change of the planner that a reader would notice is noticed here."""
    (shown,) = re.findall(r"<!-- recipes -->\n(.*?)<!-- recipes end -->", read("README.md"), re.DOTALL)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown.splitlines()[2:]]
    assert 6 <= len(rows) <= 8
    for _, gpus, command, layout, speed, gigabytes, hours in rows:
        (name,) = re.findall(r"\+recipe=(\w+)", command)
        recipe = for_planning(compose([f"+recipe={name}", "cluster=h100"])[0], stands=True)
        machine = machine_of(recipe)
        tokens_per_second = step_time(recipe, machine).tokens_per_second
        reserved = reserved_bytes(recipe, machine, most_memory(recipe)) / 1e9
        assert reserved < machine.memory_bytes / 1e9, name
        assert (int(gpus), layout) == (recipe.world, recipe.layout.label), name
        assert number(speed) == float(f"{tokens_per_second:.3g}"), name
        assert gigabytes == f"{reserved:.0f} GB", name
        assert number(hours) == float(f"{round(1e9 / tokens_per_second / 3600):.3g}"), name
    assert all("launch=slurm cluster=h100`" in row[2] for row in rows if int(row[1]) > 8)


def rows_of(page, header):
    (rows,) = [rows for head, rows in tables(page) if header in head[:2]]
    return rows


def test_the_layouts_of_the_tutorial_are_those_that_are_planned(capsys):
    page = read("docs/tutorial.md")
    (shown,) = re.findall(r"```text\n(8\.03B parameters on 8 H100.*?)```", page, re.DOTALL)
    assert main(["plan", "+recipe=llama3_1_8b_8gpus", "cluster=h100", "--top", "5"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in shown.splitlines()] == [line.rstrip() for line in said[: len(shown.splitlines())]]


def test_runs_of_the_quickstarts_sweep_are_named_as_it_names_them():
    """`titanlab status quickstart_layouts fsdp` stood on three pages, and there is no such run."""
    names = {planned.recipe.name for planned in plan_study(["+sweeps=quickstart_layouts"]).planned}
    commands_of_all = [(page, command.text) for page in PAGES for command in commands(page)]
    named = [
        (page, found[1])
        for page, text in commands_of_all
        if (found := re.match(r"titanlab \w+ quickstart_layouts ([a-z]\S*)", text)) is not None
    ]
    assert len(named) >= 3
    assert [each for each in named if each[1] not in names] == []
