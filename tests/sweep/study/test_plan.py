"""Planning a sweep: points, what is dropped and why, names, identities, and the plan in words."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tests.sweep.files import dropped, labels, plan, sweep_text, write_sweep
from tests.sweep.studies import SLURM, seeds, study
from titanlab.data import source
from titanlab.errors import ConfigError
from titanlab.plan import MEMORY_ERROR, Estimate
from titanlab.sweep import decide, fitting, plan_lines, plan_study, submit
from titanlab.sweep import plan as studies
from titanlab.techniques.tracker.trackers_schema import Wandb

SMALL = ("data=synthetic", "optimizer.schedule.warmup_steps=0")


def test_a_file_becomes_runs_and_dropped_points(tmp_path):
    space = {
        "product": [
            {"list": [{"parallelism": "fsdp", "world": 2}, {"parallelism": "tp", "world": 3}, {"parallelism": "fsdp_tp", "world": 3}]},
            {"precision": ["fp32", "bf16"], "seed": [0, 1]},
        ]
    }  # fmt: skip
    node = {"where": ["precision == 'fp32' or seed == 0"], "repeats": 2}
    found = plan(*write_sweep(tmp_path, sweep_text(space, node=node)))
    assert (found.name, found.origin) == ("mine", "sweeps/mine")
    assert found.definition["space"] == space
    assert (found.definition["where"], found.definition["repeats"]) == (node["where"], 2)
    points = ["fsdp-world2-fp32-seed0", "fsdp-world2-fp32-seed1", "fsdp-world2-bf16-seed0"]
    assert labels(found) == [f"{point}{repeat}" for point in points for repeat in ("", "-r1")]
    first = found.planned[1]
    assert (first.recipe.sweep, first.recipe.repeat, first.point.repeat, first.recipe.layout.shard) == ("mine", 1, 1, 2)
    assert first.point.values == {"parallelism": "fsdp", "world": 2, "precision": "fp32", "seed": 0}
    by_stage = {stage: [each for each in dropped(found) if each[1] == stage] for stage in ("where", "layout", "rule")}
    assert len(dropped(found)) == sum(map(len, by_stage.values())) == 24 - 6
    assert {reason for _, _, reason in by_stage["where"]} == {"precision == 'fp32' or seed == 0"}
    assert {reason.partition(";")[0] for _, _, reason in by_stage["layout"]} == {"world=3: the other degrees make 2, which does not divide it"}  # fmt: skip
    assert {reason.partition(":")[0] for _, _, reason in by_stage["rule"]} == {"parallelism.tensor=3"}
    assert {each.point.repeat for each in found.dropped} == {0, 1}
    assert len({each.identity.sha256 for each in found.planned}) == 6


def test_the_command_line_adds_to_a_files_space(tmp_path):
    given = write_sweep(tmp_path, sweep_text({"zip": {"training.seq_len": [64, 128], "training.global_batch": [8, 4]}}))
    found = plan(*given, "seed=range(0,2)", "training.steps=5")
    assert labels(found) == [
        *("seq_len64-global_batch8-seed0", "seq_len64-global_batch8-seed1"),
        *("seq_len128-global_batch4-seed0", "seq_len128-global_batch4-seed1"),
    ]
    assert {each.recipe.training.steps for each in found.planned} == {5}
    assert found.definition["overrides"] == ["+sweeps=mine", "training.steps=5"]
    # A name that the user gives is the beginning of each.
    assert labels(plan(*given, "name=mine"))[0] == "mine-seq_len64-global_batch8"


@pytest.mark.parametrize(
    ("given", "in_file", "kinds"),
    [
        ((), None, {"breakdown"}),
        (("profiler=off",), None, {"off"}),
        ((), "memory", {"memory"}),
        # A profiler makes no other run.
        (("profiler=off,rates",), None, {"off"}),
    ],
)
def test_runs_of_a_sweep_measure_the_parts_of_a_step_unless_anything_says_which_profiler(
    tmp_path, given, in_file, kinds
):
    text = sweep_text({"product": {"seed": [0, 1]}})
    if in_file is not None:
        text = text.replace("defaults:\n", f'defaults:\n  - override /profiler: "{in_file}"\n')
    arguments = [*write_sweep(tmp_path, text), *given]
    measured, plain = plan_study(arguments, measured=True), plan_study(arguments)
    assert {each.recipe.profiler.kind for each in measured.planned} == kinds
    assert {each.recipe.profiler.every for each in measured.planned if each.recipe.profiler.kind == "breakdown"} <= {0}
    # The runs are the same ones, and the sweep's definition has what the user has given.
    assert [each.identity for each in measured.planned] == [each.identity for each in plain.planned]
    assert measured.definition == plain.definition


def test_hydras_own_sweeps_are_a_product():
    found = plan("-m", *SMALL, "model=debug,llama_5m", "precision=glob(b*)", "seed=range(0,4,2)", "repeat=choice(0,2)")
    assert len(found.planned) == 2 * 2 * 2 * 2
    assert found.definition["space"] == {
        "product": {"model": ["debug", "llama_5m"], "precision": ["bf16", "bf16_full"], "seed": [0, 2], "repeat": [0, 2]}
    }  # fmt: skip
    assert [each.recipe.name for each in found.planned[:2]] == ["debug-bf16-seed0", "debug-bf16-seed0-r2"]
    assert found.origin == "command line"


def test_a_recipe_may_be_swept_and_may_sweep_all_else():
    found = plan("+recipe=llama3_1_8b_8gpus_cpu,llama3_1_70b_32gpus_cpu", "seed=0,1")
    assert labels(found)[::2] == ["llama3_1_8b_8gpus_cpu-seed0", "llama3_1_70b_32gpus_cpu-seed0"]
    assert [each.recipe.layout.label for each in found.planned[::2]] == ["dp_s2", "dp_s2·tp2"]
    # The folder has no recipe's name: it stays the same if the first of them cannot run any more.
    assert re.fullmatch(r"run-[0-9a-f]{6}", found.name)


@pytest.mark.full
def test_the_folders_name_is_what_is_given_or_made_of_what_is_swept(tmp_path):
    assert plan(*SMALL, "seed=0,1", "sweep=given").name == "given"
    names = [plan(*SMALL, *swept).name for swept in (["seed=0,1"], ["seed=0,1", "training.steps=7"], ["seed=0,2"])]
    # Values that all points share may change: these are more runs of the same sweep.
    assert names[0] == names[1] != names[2]
    assert names[0].startswith("run-")
    assert len(names[0]) == len("run-") + 6
    assert plan(*SMALL).name == "single"
    assert plan(*write_sweep(tmp_path, sweep_text({"list": [{"seed": 1}, {}]}) + "sweep: another\n")).name == "another"


def test_two_points_that_are_one_run_are_run_once():
    found = plan(*SMALL, "parallelism=single,fsdp,ddp", "world=1")
    assert labels(found) == ["single"]
    assert dropped(found) == [(label, "duplicate", "is the same run as single") for label in ("fsdp", "ddp")]


def test_conditions_see_degrees_and_options_as_they_will_be(tmp_path):
    space = {"product": {"parallelism": ["fsdp_tp", "ddp", "single"], "world": [2, 4, None]}}
    given = write_sweep(tmp_path, sweep_text(space, node={"where": ["world >= 2 and parallelism.shard * parallelism.replicate == world // parallelism.tensor"]}))  # fmt: skip
    found = plan(*given)
    assert labels(found) == ["fsdp_tp-world2", "fsdp_tp-world4", "ddp-world2", "ddp-world4"]
    stages = [(label, stage) for label, stage, _ in dropped(found)]
    # `-1` of no world, a world that single is not, and the condition.
    assert stages == [
        *(("fsdp_tp-world_none", "layout"), ("ddp-world_none", "layout")),
        *(("single-world2", "layout"), ("single-world4", "layout"), ("single-world_none", "where")),
    ]


def test_a_value_of_some_options_only_drops_the_others(tmp_path):
    found = plan("model=debug", *SMALL, "ac=none,selective_layer", "ac.every=1,2")
    assert labels(found) == ["selective_layer-every1", "selective_layer-every2"]
    assert [(label, stage) for label, stage, _ in dropped(found)] == [("ac_none-every1", "composition"), ("ac_none-every2", "composition")]  # fmt: skip
    assert "it belongs to another ac: try ac=selective_layer" in found.dropped[0].reason


def test_a_condition_excludes_values_that_do_not_fit_together(tmp_path):
    swept, condition = {"model.heads": [2, 4], "model.kv_heads": [2, 4]}, "model.heads % model.kv_heads == 0"
    # Any other point that cannot run is an error here, as for `train -m`.
    found = plan_study(write_sweep(tmp_path, sweep_text({"product": swept}, node={"where": [condition]})), whole=True)
    assert labels(found) == ["heads2-kv_heads2", "heads4-kv_heads2", "heads4-kv_heads4"]
    assert dropped(found) == [("heads2-kv_heads4", "where", condition)]


def test_a_condition_excludes_degrees_that_do_not_make_their_world(tmp_path):
    swept, node = {"world": [1, 2], "seed": [0, 1]}, {"where": ["seed == 0 and world == 1"]}
    found = plan(*write_sweep(tmp_path, sweep_text({"product": swept}, node=node)))
    assert labels(found) == ["world1-seed0"]
    stages = [(label, stage) for label, stage, _ in dropped(found)]
    # A condition on the world needs a layout.
    assert stages == [("world1-seed1", "where"), ("world2-seed0", "layout"), ("world2-seed1", "where")]


def test_this_host_is_not_looked_at_for_runs_elsewhere(monkeypatch):
    monkeypatch.setattr(studies, "this_host", lambda: pytest.fail("asked this host"))
    found = plan("+recipe=llama3_1_8b_8gpus", "launch=slurm", "cluster=h100", "precision=bf16,float8_tensorwise")
    assert [each.recipe.cluster.device for each in found.planned] == ["NVIDIA H100 80GB HBM3"] * 2
    assert found.planned[0].identity.content["hardware"] == "NVIDIA H100 80GB HBM3"


def test_data_is_prepared_once_and_its_rules_hold(monkeypatch, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a few words of text\n" * 200)
    prepared = []
    monkeypatch.setattr(source, "prepare", lambda config, *, report: prepared.append(config.vocab_size))
    given = ["data=files", f"data.files={text}", "data.vocab_size=320,340", "seed=0,1,2"]
    found = plan(*given, prepare_data=True)
    assert prepared == [320, 340]
    assert len(found.planned) == 6
    assert len({each.identity.content["data"] for each in found.planned}) == 2

    def refuse(config, *, report):
        if config.vocab_size == 340:
            raise ConfigError("data.vocab_size", 340, "is too large", "try 320")

    monkeypatch.setattr(source, "prepare", refuse)
    found = plan(*given, prepare_data=True)
    assert len(found.planned) == 3
    assert {each[1:] for each in dropped(found)} == {("rule", "data.vocab_size=340: is too large; try 320")}


def test_rules_on_prepared_data_are_checked_once_it_is_there(monkeypatch, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a few words of text\n" * 200)
    prepared, check = [], studies.check_data

    def too_small(recipe):
        if prepared and recipe.training.seq_len == 64:
            raise ConfigError("data.files", "text.txt", "is too small", "give more")
        check(recipe)

    monkeypatch.setattr(source, "prepare", lambda config, *, report: prepared.append(config))
    monkeypatch.setattr(studies, "check_data", too_small)
    found = plan("data=files", f"data.files={text}", "data.vocab_size=320", "training.seq_len=32,64", prepare_data=True)
    assert (labels(found), len(prepared)) == (["seq_len32"], 1)
    assert dropped(found) == [("seq_len64", "rule", "data.files=text.txt: is too small; give more")]


def test_a_control_runs_beside_the_points_and_changes_no_other_run(tmp_path):
    space = {"product": {"ac": ["none", "full"]}}
    alone = plan(*write_sweep(tmp_path, sweep_text(space, node={"repeats": 2})))
    assert "control" not in alone.definition
    found = plan(*write_sweep(tmp_path, sweep_text(space, node={"repeats": 2, "control": {"precision": "fp32"}})))
    assert labels(found) == [*labels(alone), "control-1", "control-2", "control-3"]
    assert [each.identity.sha256 for each in found.planned[:4]] == [each.identity.sha256 for each in alone.planned]
    assert found.definition["control"] == {"precision": "fp32"}
    controls = found.planned[4:]
    assert all(each.point.is_control and each.recipe.precision.kind == "fp32" for each in controls)
    # Other runs than repeats of a point with the same recipe.
    assert [each.recipe.repeat for each in controls] == [1000, 1001, 1002]
    assert len({each.identity.sha256 for each in found.planned}) == 7


def test_conditions_see_values_as_they_will_be(tmp_path):
    # A file may have numbers as texts, which the composition reads as numbers.
    swept = {"seed": ["3", 4], "optimizer.lr": ["1e-3", "0.1"], "training.steps": [20, 1]}
    # Resolving the recipe sets the warm-up; a group without an option is equal to no name.
    where = ["seed == 3", "optimizer.lr < 1e-2", "optimizer.schedule.warmup_steps <= training.steps", "recipe != 'x'"]
    assert labels(plan(*write_sweep(tmp_path, sweep_text({"product": swept}, node={"where": where})))) == [
        "3-lr_1e-3-steps20"
    ]


def test_data_that_is_not_here_may_be_where_the_runs_are(tmp_path):
    given = ["data=files", f"data.files={tmp_path}/none.txt", "seed=0,1"]
    assert len(studies.plan_study(given, elsewhere=True).planned) == 2
    with pytest.raises(ConfigError, match=r"^data\.files="):
        plan(*given)


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """`planned(points, …)`: a study of Slurm jobs in the folder `runs` here, and the decisions on its runs."""
    monkeypatch.chdir(tmp_path)

    def plan(points, **given):
        found = study(tmp_path / "runs", points, launch=given.pop("launch", SLURM), **given)
        return found, list(decide(found, answered=False))

    return plan


def estimate(**given):
    return Estimate(
        **{"hours": 1.5, "reserved_bytes": 2_000_000_000, "limit_bytes": None, "checkpoint_bytes": 5, **given}
    )


def test_what_is_submitted_is_summed(planned):
    lines = plan_lines(*planned([{"shard": 1}, {"shard": 2}, {"shard": 6}]), answered=False)
    assert lines[0] == "layouts: 3 runs (sweeps/layouts)"
    assert "3 to submit" in lines
    assert lines[-1] == "3 jobs: 9 processes in all, 4 nodes, 3 arrays; the largest has 6"


@pytest.mark.parametrize(
    ("given", "cells"),
    [
        ({}, ("1.5", "2.0", "5e-09")),
        ({"hours": 0.0}, ("0", "2.0", "5e-09")),
        ({"hours": 999.7}, ("1,000", "2.0", "5e-09")),
        ({"hours": 12345.6}, ("12,346", "2.0", "5e-09")),
        ({"checkpoint_bytes": 4_860_000_000_000}, ("1.5", "2.0", "4,860")),
        ({"checkpoint_bytes": 999_900_000_000}, ("1.5", "2.0", "1,000")),
        ({"limit_bytes": 1e9}, ("1.5", "2.0 too much", "5e-09")),
        ({"limit_bytes": 2e9}, ("1.5", "2.0", "5e-09")),
    ],
)
def test_estimates_are_numbers_that_people_write(planned, monkeypatch, given, cells):
    monkeypatch.setattr(submit, "estimated", lambda recipe: estimate(**given))
    line = next(line for line in plan_lines(*planned(seeds(1)), answered=False) if line.endswith("submit"))
    shown = tuple(re.split(r"\s{2,}", line)[-4:-1])
    assert shown == tuple("5.00e-09" if cell == "5e-09" else cell for cell in cells)


def test_runs_that_ended_without_the_tracker_that_is_asked_for_now_are_told(planned):
    """A sweep with tracker=wandb was only "6 done already", and wandb never had anything of it."""
    found, decisions = planned(seeds(2))
    asked = [
        dataclasses.replace(decision, action="done", recipe=dataclasses.replace(decision.recipe, tracker=Wandb()))
        for decision in decisions
    ]
    line = "2 runs ended without tracker=wandb; to write its files from metrics.jsonl: titanlab sync --tracker wandb "
    assert any(each.startswith(line) for each in plan_lines(found, asked))
    # Without it nothing is said.
    done = [dataclasses.replace(decision, action="done") for decision in decisions]
    assert not any("tracker" in each for each in plan_lines(found, done))


@pytest.fixture
def reserved(monkeypatch):
    """Bytes that a run would reserve of its device's 80 GB, by its seed; of other seeds there is no estimate."""
    known = {}

    def estimated(recipe):
        if recipe.seed not in known:
            return "not measured"
        return Estimate(hours=1.0, reserved_bytes=known[recipe.seed], limit_bytes=80e9, checkpoint_bytes=1)

    monkeypatch.setattr(studies, "estimated", estimated)
    return known


def test_what_exceeds_memory_by_more_than_the_error_of_estimates_is_left_out(tmp_path, reserved):
    """5 of 11 points of a sweep for 512 GPUs were submitted although their estimates were two to three times too much."""
    reserved.update({0: 80_000_000_000, 1: 93_600_000_000, 2: 117_700_000_000})
    given = study(tmp_path, seeds(4), dropped=[{"seed": 9}])
    kept = fitting(given, strictly=False)
    # The one of seed 3 has no estimate, and what is not known is not left out.
    assert [planned.recipe.seed for planned in kept.planned] == [0, 1, 3]
    assert [(each.point.values, each.stage) for each in kept.dropped] == [
        ({"seed": 9}, "rule"),
        ({"shard": 1, "seed": 2}, "memory"),
    ]
    assert kept.dropped[1].reason == "would reserve about 118 GB of a device's 80.0 GB"
    assert kept.notices == (
        (
            "1 run may not fit into memory: each estimate exceeds it, but by less than the largest error of estimates "
            "(40 %); --prune leaves them out"
        ),
        (
            "1 run left out: their estimates exceed a device's memory by more than 40 %, the largest error of estimates; "
            "--keep keeps all"
        ),
    )
    assert (kept.name, kept.definition) == (given.name, given.definition)


def test_strictly_all_that_exceed_memory_are_left_out(tmp_path, reserved):
    reserved.update({0: 80_000_000_000, 1: 80_100_000_000, 2: 200_000_000_000})
    kept = fitting(study(tmp_path, seeds(4)), strictly=True)
    assert [planned.recipe.seed for planned in kept.planned] == [0, 3]
    assert kept.notices == ()


def test_a_study_of_which_nothing_fits_is_refused(tmp_path, reserved):
    reserved.update({0: 190e9, 1: 191e9})
    with pytest.raises(ConfigError) as raised:
        fitting(study(tmp_path, seeds(2)), strictly=False)
    assert str(raised.value) == (
        "arguments=layouts: none of 2 runs fits into memory; would reserve about 191 GB of a device's 80.0 GB; "
        "see what fits: titanlab plan; or submit them all the same: --keep"
    )


def test_the_error_is_that_of_the_published_run_whose_estimate_was_most_too_high():
    page = (Path(__file__).parents[3] / "docs" / "planner-accuracy.md").read_text()
    rows = re.findall(r"^\| \d+ \| .* \| ([+-][\d.]+)% \| [^|]+ \|$", page.partition("## Memory")[2], re.MULTILINE)
    errors = [float(error) / 100 for error in rows]
    assert len(errors) > 25
    assert max(errors) <= MEMORY_ERROR < max(errors) + 0.01
