"""Runs whose checkpoints are in a store: they save, resume, fall back and clean up as on a disk."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import tiny
from tests.object_store.running import FOLDER, known
from tests.object_store.server import Fault
from titanlab.checkpoint import (
    StorePath,
    checkpoints_of,
    claim_place,
    find,
    latest,
    list_checkpoints,
    of_step,
    put_aside,
    put_back,
    read_contents,
    step_of,
)
from titanlab.checkpoint.folders import OWNER, checkpoints
from titanlab.checkpoint.storage import folder_at
from titanlab.cli import main
from titanlab.errors import ConfigError
from titanlab.launch import conclude, pass_over_damaged
from titanlab.launch.attempt import begin
from titanlab.records import OutcomeKind, RunFolder, from_exception
from titanlab.system import StoreFault

MEMORY = "memory://titanlab-tests"


def losses(run):
    return {row["step"]: row["loss_metrics/global_avg_loss"] for row in run.metrics("train")}


def steps(run):
    return [step_of(path) for path in checkpoints(checkpoints_of(run))]


def below(server, run):
    """Names of the store's objects, from the run's folder of checkpoints."""
    start = str(checkpoints_of(run)).removeprefix("emu://") + "/"
    return [name.removeprefix(start) for name in server.store.below(start)]


def as_rank(endpoint, made, run):
    """As a rank: train, and return the step that was reached."""
    known(endpoint)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("titanlab.checkpoint.storage._WAITS", (0.0, 0.0))
        return tiny.as_rank(made, run).step


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Losses of a run on the disk."""
    made = tiny.recipe(tmp_path_factory.mktemp("disk"), steps=6)
    run = tiny.begin(made)
    tiny.as_rank(made, run)
    return losses(run)


def test_a_run_saves_to_memory_and_resumes_bit_for_bit(tmp_path, undisturbed, monkeypatch):
    # This process stays, so its memory may stand for a store.
    monkeypatch.setattr("titanlab.checkpoint.address_schema._PRIVATE", ())
    made = tiny.recipe(tmp_path, steps=6, every=2, keep=2, saves="async", folder=MEMORY)
    run = tiny.begin(made)
    tiny.as_rank(made, run)
    assert steps(run) == [4, 6]
    assert not list(run.checkpoints.iterdir())
    undone(run, 6)
    tiny.as_rank(made, tiny.begin(made, run))
    assert losses(run) == undisturbed
    assert [row["step"] for row in run.metrics("attempt")] == [0, 4]
    assert steps(run) == [4, 6]
    for path in checkpoints(checkpoints_of(run)):
        read_contents(path, "run").verify()


def test_another_layout_reads_only_what_it_needs_and_each_range_once(pool, tmp_path, server, undisturbed):
    made = tiny.recipe(tmp_path, steps=6, every=4, folder=FOLDER, shard=2)
    run = tiny.begin(made)
    pool.run(2, as_rank, server.endpoint, made, run)
    undone(run, 6)
    assert below(server, run) == [
        *["step-00000004/index.json", "step-00000004/position.json"],
        *["step-00000004/rank-00000.safetensors", "step-00000004/rank-00001.safetensors"],
    ]
    server.store.log.clear()
    pool.run(1, as_rank, server.endpoint, tiny.changed(made, shard=1), tiny.begin(made, run))
    read = [(name, span) for method, name, span in server.store.log if method == "GET" and "rank-" in name]
    assert len(read) == len(set(read)) > 0
    for name in {name for name, _ in read}:
        spans = sorted(span for other, span in read if other == name)
        assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False))
    assert losses(run) == pytest.approx(undisturbed, abs=1e-5)


def test_the_index_is_written_last_and_old_ones_are_removed_index_first(tmp_path, server):
    made = tiny.recipe(tmp_path, steps=6, every=2, keep=1, keep_every=4, folder=FOLDER)
    run = tiny.begin(made)
    tiny.as_rank(made, run)
    assert steps(run) == [4, 6]
    for step in (2, 4, 6):
        put = [
            name.rpartition("/")[2] for method, name, _ in server.store.log if method == "PUT" and f"0{step}/" in name
        ]
        assert put == ["rank-00000.safetensors", "position.json", "index.json"]
    removed = [name.rpartition("/")[2] for method, name, _ in server.store.log if method == "DELETE"]
    assert removed[0] == "index.json"
    assert len(removed) == 3


def test_leftovers_of_an_interrupted_save_do_not_count_and_are_removed(tmp_path, server):
    made = tiny.recipe(tmp_path, steps=4, every=2, keep=0, folder=FOLDER)
    run = tiny.begin(made)
    tiny.as_rank(tiny.changed(made, steps=2), run)
    place = checkpoints_of(run)
    for name in ("step-00000003", "step-00000009.part", "step-00000001.aside"):
        folder_at(place / name).put("rank-00000.safetensors", b"half")
    assert steps(run) == [2]
    assert [row.name for row in list_checkpoints(place, verifies=False)] == ["step-00000002"]
    run.path.joinpath("result.json").unlink()
    tiny.as_rank(made, tiny.begin(made, run))
    assert {name.partition("/")[0] for name in below(server, run)} == {"step-00000002", "step-00000004"}


def damaged(server, run, step, change):
    (name,) = [name for name in server.store.below("") if f"{run.path.name}/step-{step:08d}/rank-00000" in name]
    server.store.objects[name] = change(server.store.objects[name])


def saved_twice(tmp_path):
    made = tiny.recipe(tmp_path, steps=6, every=2, keep=0, folder=FOLDER)
    run = tiny.begin(made)
    tiny.as_rank(made, run)
    undone(run, 6)
    run.note_saved(1, 4)
    return made, run


def undone(run, step):
    """As if the run had been killed before it saved this step."""
    folder_at(checkpoints_of(run) / f"step-{step:08d}").remove()
    run.path.joinpath("result.json").unlink()


def test_damage_that_a_rank_finds_falls_back(tmp_path, server, undisturbed):
    made, run = saved_twice(tmp_path)
    damaged(server, run, 4, lambda content: content[:-9] + b"?" + content[-8:])
    tiny.as_rank(made, tiny.begin(made, run))
    assert losses(run) == undisturbed
    assert "step-00000004.damaged/index.json" in below(server, run)
    log = (run.logs / "rank-0.log").read_text()
    assert "goes on from step 2" in log


def test_damage_that_shows_before_the_start_falls_back_in_one_line(tmp_path, server):
    made, run = saved_twice(tmp_path)
    damaged(server, run, 4, lambda content: content[:-1])
    said = []
    with pytest.raises(ConfigError, match="holds the checkpoints of another run"):
        pass_over_damaged(run, made, said.append)
    folder_at(checkpoints_of(run)).put(OWNER, owner(run))
    pass_over_damaged(run, made, said.append)
    (line,) = said
    assert line.startswith("goes on from step 2: step-00000004 is damaged: its file rank-00000.safetensors has")
    assert steps(run) == [2]


def owner(run):
    return json.dumps({"sha256": run.identity().sha256, "created": run.created()}).encode()


def test_later_checkpoints_are_put_aside_and_back(tmp_path, server):
    _made, run = saved_twice(tmp_path)
    place = checkpoints_of(run)
    before = below(server, run)
    renamed = put_aside(place, after=2)
    assert [path.name for path in renamed] == ["step-00000004.aside"]
    assert latest(place) == of_step(place, 2, "run", run)
    rows = {row.name: row.state for row in list_checkpoints(place, verifies=True)}
    assert rows == {"step-00000002": "complete", "step-00000004.aside": "put aside"}
    put_back(renamed)
    assert below(server, run) == before
    with pytest.raises(ConfigError, match="the run has no whole checkpoint of this step; it has 2, 4"):
        of_step(place, 3, "--step", 3)


def test_the_training_goes_on_after_a_save_that_fails(pool, tmp_path, server):
    made = tiny.recipe(tmp_path, steps=6, every=2, keep=0, saves="async", shard=2, folder=FOLDER)
    run = tiny.begin(made)
    server.store.faults = [Fault("PUT", "step-00000004/rank-00001", "503", 3)]
    pool.run(2, as_rank, server.endpoint, made, run)
    assert run.result().kind is OutcomeKind.DONE
    assert steps(run) == [2, 6]
    assert not [name for name in below(server, run) if "step-00000004" in name]
    log = " ".join((run.logs / "rank-0.log").read_text().split())
    assert log.count("the checkpoint of step 4 is not saved: the store cannot be used (emu://") == 1


def test_a_save_of_a_step_that_is_there_replaces_it_only_when_it_is_complete(tmp_path, server):
    _made, run = saved_twice(tmp_path)
    old = server.store.objects[f"{str(latest(checkpoints_of(run))).removeprefix('emu://')}/index.json"]
    place = checkpoints_of(run)
    assert folder_at(place).begin("step-00000004") == place / "step-00000004.part"
    assert folder_at(place).begin("step-00000005") == place / "step-00000005"
    assert server.store.objects[f"{str(place).removeprefix('emu://')}/step-00000004/index.json"] == old


def test_the_folder_of_another_run_is_refused(tmp_path, server):
    made = tiny.recipe(tmp_path / "one", steps=2, folder=FOLDER)
    run = tiny.begin(made)
    claim_place(run)
    claim_place(run)
    tiny.as_rank(made, run)
    # The same recipe in another folder of runs has the same name.
    other = tiny.begin(replace(made, runs=str(tmp_path / "two")))
    assert checkpoints_of(other) == checkpoints_of(run)
    with pytest.raises(ConfigError, match="checkpoint.folder=.* holds the checkpoints of another run; choose another"):
        claim_place(other)
    server.store.objects[f"{str(checkpoints_of(run)).removeprefix('emu://')}/{OWNER}"] = b"{no json"
    with pytest.raises(ConfigError, match="another run"):
        claim_place(run)


def test_the_place_stays_when_the_folder_of_the_run_moves(tmp_path, server):
    run = tiny.begin(tiny.recipe(tmp_path / "one", steps=2, folder=f"{FOLDER}/"))
    place = checkpoints_of(run)
    assert place == StorePath(FOLDER) / "single" / run.path.name
    moved = shutil.move(run.path, tmp_path / "elsewhere")
    assert checkpoints_of(RunFolder(Path(moved))) == place


@pytest.mark.parametrize("folder", ["file:///etc", "simplecache::file:///etc", "http://host/x", "emu://a:pa55@b/c"])
def test_the_config_of_a_stranger_names_no_other_place(tmp_path, server, folder):
    run = tiny.begin(tiny.recipe(tmp_path, steps=2, folder=FOLDER))
    config = run.path / "config.yaml"
    config.write_text(config.read_text().replace(FOLDER, folder))
    with pytest.raises(ConfigError, match="checkpoint.folder=") as error:
        checkpoints_of(run)
    assert "pa55" not in str(error.value)


def test_a_store_that_is_down_ends_before_anything_starts(tmp_path, server, capsys):
    run = tiny.begin(tiny.recipe(tmp_path, steps=2, folder=FOLDER))
    server.store.faults = [Fault("GET", "", "503", -1), Fault("HEAD", "", "503", -1)]
    assert main(["checkpoints", str(run.path)]) == OutcomeKind.CRASH.exit_code
    err = capsys.readouterr().err
    assert err.startswith("error: the store cannot be used (emu://")
    assert err.count("\n") == 1


def test_a_run_that_a_store_has_ended_gets_its_result_while_the_store_is_down(tmp_path, server):
    _made, run = saved_twice(tmp_path)
    server.store.faults = [Fault("GET", "", "503", -1), Fault("HEAD", "", "503", -1)]
    fault = StoreFault(FOLDER, "it is down")
    run.write_failure(from_exception(fault, rank=0, attempt=1))
    ended = conclude(run, 1, {0: 1})
    assert ended == run.result()
    assert (ended.kind, ended.step) == (OutcomeKind.CRASH, 6)
    assert ended.cause.startswith(f"the store cannot be used ({FOLDER}: it is down): check its address")


def test_a_checkpoint_of_a_store_starts_another_run(tmp_path, server):
    _made, run = saved_twice(tmp_path)
    place = checkpoints_of(run)
    assert find(str(place), "key") == find(str(run.path), "key") == find(f"{place}/step-4", "key")
    with pytest.raises(ConfigError, match="holds no complete checkpoint; give the folder of a run"):
        find(f"{FOLDER}/none", "checkpoint.load_from")
    follower = tiny.recipe(tmp_path, steps=5, name="follower", load_from=f"{place}/step-4", folder=FOLDER)
    other = tiny.begin(follower)
    assert tiny.as_rank(follower, other).step == 5
    assert list(losses(other)) == [5]
    weights = replace(tiny.recipe(tmp_path, steps=2), init_from=str(place), name="weights")
    assert tiny.as_rank(weights, tiny.begin(weights)).step == 2


def test_a_run_whose_checkpoints_are_gone_is_refused(tmp_path, server):
    made, run = saved_twice(tmp_path)
    place = checkpoints_of(run)
    server.store.objects.clear()
    with pytest.raises(ConfigError, match=f"had saved step 4, and {place} has no checkpoint any more"):
        begin(run, made, SimpleNamespace(started_by="local", processes=None, checkpoint=None, report=print))
