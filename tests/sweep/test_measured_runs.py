"""The runs of a sweep from which a cluster is calibrated: medians over repeats, and why others are left out."""

import json

import pytest

from tests.sweep.made import SUMMARY, begin, end, train
from titanlab.costs import meter
from titanlab.errors import ConfigError
from titanlab.sweep import SweepTable, measured_sweep

RESIDENT, OF_ALL = "memory/max_resident(GiB)", "memory/max_over_ranks(GiB)"


def summary(seconds, **given):
    return {**SUMMARY, meter.STEP_SECONDS: seconds, "peak_tflops": 0.1, **given}


def done(made, name, seconds=0.25, *, env=None, metrics=None, cores=2, **given):
    """A run that is done; `env`: keys of env.json that are other than those of `begin`."""
    run = made.run(name, **given)
    attempt = begin(run, cores=cores)
    path = run.attempt_folder(attempt) / "env.json"
    facts = {"packages": {"torch": "2.13.0"}, "threads": 1}
    known = json.loads(path.read_text())
    known["host"] |= {"cpu": "Fast CPU", "memory_gib": 16.0}
    known["code"]["version"] = "0.1.0"
    path.write_text(json.dumps({**known, **facts, **(env or {})}))
    end(run, metrics=summary(seconds) if metrics is None else metrics)
    return run


def read(made):
    return measured_sweep(made.folder, SweepTable(made.folder, code="c0de").rows())


def reasons(found):
    return {left_out.run.rpartition("-")[0]: left_out.reason for left_out in found.left_out}


def test_repeats_are_one_row_with_their_medians(made):
    first = done(made, "a", 0.2, metrics=summary(0.2, **{RESIDENT: 0.5, OF_ALL: 1.0}), shard=2, repeat=0)
    done(made, "a", 0.4, metrics=summary(0.4, **{RESIDENT: 0.5, OF_ALL: 3.0}), shard=2, repeat=1)
    done(made, "a", 0.3, metrics=summary(0.3, **{RESIDENT: 0.5, OF_ALL: 2.0}), shard=2, repeat=2)
    done(made, "b", 0.7)
    found = read(made)
    assert [(row.name, row.step_seconds) for row in found.rows] == [(first.path.name, 0.3), (found.rows[1].name, 0.7)]
    # Where ranks were compared, the largest of them; the table's figure is that of rank 0.
    assert [row.memory_bytes for row in found.rows] == [2.0 * 2**30, 0.75 * 2**30]
    assert (found.runs, found.left_out, found.stale) == (4, [], 0)
    assert found.machine == "Fast CPU, 1 thread a process"
    assert found.rows[0].recipe.layout.shard == 2


def test_the_cluster_has_what_the_runs_tell_of_it(made):
    done(made, "a", metrics=summary(0.1, **{RESIDENT: -1.0}))
    assert read(made).rows[0].memory_bytes is None
    cluster = read(made).rows[0].recipe.cluster
    # The recipe gives a peak, which stands; two cores share 16 GiB.
    assert cluster.peak_tflops == 1.0
    assert cluster.memory_gb == pytest.approx(16 * 2**30 / 1e9 / 2)


def test_runs_that_say_nothing_are_left_out_with_a_reason(made):
    done(made, "good")
    made.run("waits", seed=1)
    running = made.run("runs", seed=2)
    begin(running)
    train(running)
    failed = made.run("failed", seed=3)
    begin(failed)
    end(failed, "oom", cause="no memory")
    done(made, "short", metrics=summary(0.2, **{meter.MEASURED_STEPS: 0}), seed=4)
    done(made, "crowded", cores=1, shard=2, seed=5)
    done(made, "timeless", metrics=summary("fast"), seed=6)
    done(made, "hungry", metrics=summary(0.2, **{meter.DATA_PERCENT: 12.0}), seed=10)
    damaged = done(made, "damaged", seed=7)
    (damaged.path / "result.json").write_text("{")
    foreign = done(made, "foreign", seed=8)
    config = foreign.attempt_folder(1) / "config.yaml"
    config.write_text(config.read_text().replace("seq_len:", "sequence:"))
    made.drop("rule", "no", seed=9)
    found = read(made)
    assert len(found.rows) == 1
    told = reasons(found)
    assert set(told) == {"waits", "runs", "failed", "short", "crowded", "timeless", "hungry", "damaged", "foreign"}
    assert told["waits"] == "has not begun"
    assert told["runs"] == "is still running"
    assert told["failed"] == "ended as oom"
    assert told["short"] == "has no step after the warm-up"
    assert told["crowded"] == "had more processes than cores"
    assert told["hungry"] == "waited for data in more than 5 % of its steps' time"
    assert told["timeless"] == "has no time of a step: fast"
    for name in ("damaged", "foreign"):
        assert told[name].startswith("cannot be read: "), told[name]


def test_runs_of_another_machine_or_version_are_left_out(made):
    for number in range(3):
        done(made, f"most{number}", seed=number)
    done(made, "torch", env={"packages": {"torch": "2.12.0"}}, seed=10)
    done(made, "threads", env={"threads": 4}, seed=13)
    other = done(made, "values", seed=12)
    config = other.attempt_folder(1) / "config.yaml"
    config.write_text(config.read_text().replace("network_gb_per_second: null", "network_gb_per_second: 7.0"))
    found = read(made)
    assert found.runs == 3
    assert reasons(found) == {
        "values": "has other values of its cluster than most",
        "torch": "ran on torch 2.12.0, and most on 2.13.0",
        "threads": "ran on machine Fast CPU, 4 threads a process, and most on Fast CPU, 1 thread a process",
    }


def test_runs_of_another_calibration_are_used_on_the_usual_cluster(made):
    for number in range(3):
        run = done(made, f"r{number}", seed=number)
        if number == 2:
            config = run.attempt_folder(1) / "config.yaml"
            config.write_text(config.read_text().replace("process_gb: null", "process_gb: 0.5"))
    found = read(made)
    assert (found.runs, found.left_out, found.stale) == (3, [], 0)
    assert {row.recipe.cluster.process_gb for row in found.rows} == {None}


def test_two_machines_with_equally_many_runs_are_an_error(made):
    done(made, "a", seed=1)
    done(made, "b", env={"packages": {"torch": "2.12.0"}}, seed=2)
    with pytest.raises(ConfigError, match="half on 2.13.0 and half on 2.12.0"):
        read(made)


def test_a_sweep_without_a_measured_run_is_an_error(made):
    made.run("waits", seed=1)
    made.run("too", seed=2)
    with pytest.raises(ConfigError, match="no run that was measured to its end: 2 has not begun"):
        read(made)
