"""`titanlab parity`: what it takes, prints, keeps and returns; a real one in a process of its own."""

from __future__ import annotations

import json

import pytest

from tests.sweep.made import Made, begin, end
from titanlab.costs import meter

TWO = "parallelism=fsdp world=2"


def test_recipes_of_a_sweep_are_proved_and_kept_with_it(says, here, ranks):
    code, out, _ = says("parity", "+sweeps=quickstart_layouts", "--only", "fsdp_tp")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith(
        "quickstart_layouts (sweeps/quickstart_layouts): 2 recipes, each compared with one process"
    )
    assert lines[1].startswith("reduced to 4 layers of 64, 8 heads and 2 key/value heads, vocabulary 256, 8 sequences")
    assert [line.partition("-world")[0] for line in lines[2:4]] == ["[1/2] PASS  fsdp_tp", "[2/2] PASS  fsdp_tp_pp"]
    assert lines[-2:] == ["kept in runs/quickstart_layouts/parity.json", "PASS: 2 recipes"]
    kept = json.loads((here / "runs" / "quickstart_layouts" / "parity.json").read_text())
    assert [row["passed"] for row in kept["rows"]] == [True, True]


@pytest.mark.full
def test_a_result_that_cannot_be_kept_is_a_warning(says, here, ranks):
    (here / "runs").mkdir()
    (here / "runs" / "quickstart_layouts").write_text("")
    code, out, err = says("parity", "+sweeps=quickstart_layouts", "--only", "ddp")
    assert code == 0
    assert err.startswith("warning: the result is not kept with the sweep: ")
    assert "PASS: 1 recipe" in out


def test_a_recipe_that_fails_does_not_stop_the_others_and_its_folder_stays(says, ranks, temporary):
    words = ("parity", "+sweeps=quickstart_layouts", "--only", "dp-", "--json")
    assert says(*words)[0] == 0
    assert list(temporary.iterdir()) == []
    ranks[1].add("ddp")
    code, out, _ = says(*words)
    assert code == 1
    rows = {row["run"].partition("-")[0]: row for row in json.loads(out)["rows"]}
    assert {name: row["passed"] for name, row in rows.items()} == {"ddp": False, "fsdp": True}
    (kept,) = temporary.iterdir()
    assert rows["ddp"]["reason"].startswith(f"crash: LookupError: a planted fault; log: {kept}")


def test_a_submitted_sweep_is_proved_as_far_as_its_recipes_go(says, here, ranks):
    made = Made(here / "runs")
    _, damaged = made.run("one", shard=2), made.run("two", tensor=2)
    (damaged.path / "config.yaml").write_text("model: {kind: nonesuch}\n")
    made.drop("rule", "parallelism.tensor=3: must divide 4 attention heads; try 2 or 4", parallelism="tp3")
    code, out, _ = says("parity", "layouts", "--json")
    assert code == 1
    assert [row["passed"] for row in json.loads(out)["rows"]] == [True, False, False]


def test_an_interruption_shows_what_is_known(says, ranks, monkeypatch):
    def interrupted(self, *given):
        raise KeyboardInterrupt

    monkeypatch.setattr("titanlab.cli.proofs.Trainer.__call__", interrupted)
    code, out, err = says("parity", "+recipe=quickstart")
    assert code == 130
    assert err.startswith("error: interrupted; 0 ")
    assert "PASS" not in out


def logged(runs, name, loss):
    """A run that is done, with one logged step."""
    run = Made(runs).run(name)
    begin(run)
    with run.open_metrics(1) as metrics:
        metrics.write("train", 1, {meter.LOSS: loss, meter.TOKENS_SEEN: 384, meter.GRAD_NORM: 1.0})
    end(run)
    return run


def test_paths_may_have_spaces_and_equals_signs(says, here):
    one, two = (logged(here / "my lr=3 runs", name, 5.5) for name in ("one", "two"))
    code, out, err = says("parity", f"my lr=3 runs/layouts/{one.path.name}", str(two.path))
    assert (code, err) == (0, "")
    assert out.startswith(f"{two.path.name} against {one.path.name}, at equal tokens")


def test_two_runs_whose_losses_differ_fail(says, here):
    one, two = logged(here / "runs", "one", 5.5), logged(here / "runs", "two", 5.6)
    code, out, _ = says("parity", one.path.name, two.path.name)
    assert code == 1
    assert out.splitlines()[-1] == "1 of 1 recipe failed"
    assert f"FAIL  {two.path.name}" in out
    code, out, _ = says("parity", one.path.name, two.path.name, "--json")
    values = json.loads(out)
    assert (code, values["reference"], values["compared_steps"], values["logged_steps"]) == (1, one.path.name, 1, 1)
    assert [(row["run"], row["passed"]) for row in values["rows"]] == [(two.path.name, False)]
    same = logged(here / "runs", "same", 5.5)
    code, out, _ = says("parity", one.path.name, same.path.name, "--json")
    assert (code, json.loads(out)["rows"][0]["passed"]) == (0, True)


def test_a_name_of_a_run_and_of_a_recipe_is_the_recipe_next_to_a_recipe(says, here, ranks):
    """A run is called as the recipe that it was started from."""
    Made(here / "runs").run("quickstart")
    code, out, _ = says("parity", "quickstart", f"+recipe=quickstart {TWO}", "--steps", "1")
    assert code == 0
    assert out.startswith("two recipes: 2 recipes, each compared with one process")
    assert out.splitlines()[1].endswith(", 1 step")
    code, out, _ = says("parity", "quickstart", "+recipe=quickstart")
    assert (code, out.partition(",")[0]) == (0, "one recipe")


def test_steps_and_processes_are_those_of_the_flags(says, ranks):
    layout = ["parallelism.shard=2", "parallelism.tensor=2", "world=4"]
    _, out, _ = says("parity", "+recipe=quickstart", *layout, "--steps", "1", "--processes", "2")
    assert out.splitlines()[1].endswith(", 1 step")
    assert {recipe.training.steps for recipe in ranks[0]} == {1}
    assert {recipe.layout.world for recipe in ranks[0]} == {1, 2}


def test_a_sweep_without_a_sound_recipe_is_refused(says, here, ranks):
    made = Made(here / "runs")
    run = made.run("one")
    (run.path / "config.yaml").write_text("model: {kind: nonesuch}\n")
    code, out, err = says("parity", "layouts")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: run={run.path.name}: model.kind=nonesuch: no installed package offers this option")
    assert err.endswith("; mend it, or prove another\n")


def test_real_ranks_are_forked_and_compared(call_for_real):
    (row,) = call_for_real("parity")["rows"]
    assert row["passed"]
    assert 0 < row["gradient"][0] < 1e-5
