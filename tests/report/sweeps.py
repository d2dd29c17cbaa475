"""Sweeps to report on, made in milliseconds: with each kind of end, of a stranger, and large."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import yaml

from tests.sweep.made import SUMMARY, Made, begin, end, train
from titanlab.costs import meter
from titanlab.records import RunFolder

SCRIPT = "<script>document.title='owned'</script>"
NAMES = ["<svg onload=alert(1)>", "a$x$b", "עברית‮abc", "🚀👩‍🔬", "x" * 180, "bell\x07\x1b[31m", "javascript:alert(1)"]


def summary(speed: float, memory: float, **more: Any) -> dict[str, Any]:
    """Metrics of a run that is done."""
    return {
        **SUMMARY,
        meter.TOKENS_PER_SECOND: speed,
        meter.MFU: speed / 100,
        meter.STEP_SECONDS: 384 / speed,
        "memory/max_resident(GiB)": memory,
        **more,
    }


def losses(count: int, *, seed: int = 0) -> list[float]:
    """A curve that falls."""
    noise = random.Random(seed)
    return [2.5 + 3.0 / (1 + number / 6) + 0.03 * noise.random() for number in range(count)]


def mixed(made: Made) -> Made:
    """Layouts with three repeats, one oversubscribed, a pipeline, failures of several kinds, a run under way, drops."""
    layouts = [("fsdp", {"shard": 2}, 1900.0, 0.52), ("tp", {"tensor": 2}, 1500.0, 0.41), ("single", {}, 1000.0, 0.75)]
    for name, keys, speed, memory in layouts:
        for repeat in range(3):
            run = made.run(name, repeat=repeat, **keys)
            begin(run)
            train(run, losses=losses(10))
            end(run, metrics=summary(speed * (1 + 0.01 * repeat), memory + 0.01 * repeat))
    crowded = made.run("fsdp_pp", shard=2, pipeline=2, microbatch=1)
    begin(crowded, cores=2)
    train(crowded, losses=losses(10))
    end(crowded, metrics=summary(400.0, 0.3))
    oom, crash = made.run("cp", context=2), made.run("ddp", replicate=2)
    for run, kind, cause in (
        (oom, "oom", "CUDA out of memory. Tried to allocate 2.00 GiB"),
        (crash, "crash", "ValueError: no"),
    ):
        begin(run)
        train(run, losses=losses(4))
        metrics = {"memory/max_resident(GiB)": 0.95, meter.TOKENS_PER_SECOND: 800.0} if kind == "oom" else {}
        end(run, kind, cause=cause, rank=1, traceback=f"Traceback (most recent call last):\n  {cause}", metrics=metrics)
    diverged = made.run("lr", lr=1.0, point={"optimizer.lr": 1.0})
    begin(diverged)
    train(diverged, losses=[5.5, 7.0, 9.0, float("nan")])
    end(diverged, "nan", cause="step 4: the loss is not a finite number", metrics={})
    begin(running := made.run("fsdp4", shard=4))
    train(running, losses=losses(3))
    made.run("waiting", seed=7)
    made.drop("rule", "parallelism.shard=3: 12 sequences cannot be shared among 3; try 2", parallelism="fsdp3")
    made.drop("where", "world <= 4", parallelism="fsdp8")
    made.drop("where", "world <= 4", parallelism="fsdp16")
    return made


def hostile(made: Made) -> Made:
    """A sweep of a stranger: names, causes and configs that try to become a part of the page; damaged files."""
    for number, name in enumerate(NAMES):
        run = _named(made, f"r{number}", name, seed=number, point={"seed": number, "note": f"{SCRIPT}{name}"})
        begin(run)
        train(run, losses=losses(5))
        end(run, metrics=summary(1000.0 + number, 0.5))
    long = _named(made, "long", SCRIPT.partition("</")[0], shard=2)
    begin(long)
    train(long)
    end(long, "crash", cause=f"{SCRIPT}" + "y" * 10_000, traceback=f"</pre>{SCRIPT}\x00\x1b[31m", metrics={})
    odd = made.run("odd", seed=99)
    begin(odd)
    end(odd, metrics={**summary(10.0, 0.5), meter.TOKENS_PER_SECOND: "fast", meter.MFU: {}, meter.LOSS: [1]})
    config = yaml.safe_load((odd.path / "attempts/1/config.yaml").read_text())
    config["model"]["note"] = f'"><img src=x onerror=alert(1)>{SCRIPT}'
    config["cluster"]["device"] = SCRIPT
    (odd.path / "attempts/1/config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
    (odd.path / "attempts/1/env.json").write_text(
        json.dumps({"time": 1000.0, "code": SCRIPT, "launcher": SCRIPT, "host": {"name": SCRIPT, "usable_cores": 2}})
    )
    broken = made.run("broken", seed=100)
    (broken.path / "config.yaml").write_text("{")
    gone = made.run("gone", seed=101)
    shutil.rmtree(gone.path)
    made.drop("rule", f"{SCRIPT}&amp;", parallelism=SCRIPT)
    (made.folder.path / "parity.json").write_text("{")
    made.folder.write_manifest(
        {"name": made.folder.name, "origin": SCRIPT, "overrides": [SCRIPT, "tracker.key=hf_abcdefghijklmnop"]},
        made.points,
    )
    return made


def _named(made: Made, safe: str, name: str, **given: Any) -> RunFolder:
    """A run in a folder whose name titanlab would not give."""
    run = made.run(safe, **given)
    path = run.path.with_name(f"{name}-{run.hash8}")
    run.path.rename(path)
    made.points[-1]["run"] = path.name
    made.write()
    return RunFolder(path)


def many(folder: Path, count: int) -> Made:
    """A sweep of so many runs that are done: copies of one, with other figures."""
    made = Made(folder)
    first = made.run("r", shard=2, point={"seed": 0})
    begin(first)
    train(first, losses=losses(60))
    end(first)
    made.points.clear()
    for number in range(count):
        run = RunFolder(first.path.with_name(f"r{number}-{number:08x}"))
        shutil.copytree(first.path, run.path)
        for path in (run.path / "config.yaml", run.path / "attempts/1/config.yaml"):
            path.write_text(path.read_text().replace("seed: 0", f"seed: {number}"))
        end(run, metrics=summary(1000.0 + number % 97, 0.3 + number % 89 / 100))
        made.points.append({"point": {"seed": number}, "repeat": 0, "run": run.path.name, "dropped": None})
    shutil.rmtree(first.path)
    made.write()
    return made
