"""Hydra's own idiom on a real Slurm: `titanlab train -m` with several options of a group, and a launcher and a cluster."""

import pytest

from tests.slurm.site import SMALL
from titanlab.techniques.tracker.wandb import offline_files

pytestmark = pytest.mark.slurm


def test_several_layouts_in_one_command_are_jobs_that_it_waits_for(site, monkeypatch):
    # As for a person who has set nothing: the jobs write files of wandb.
    monkeypatch.delitem(site.environment, "WANDB_MODE")
    words = ["train", "-m", "--config-dir", "conf", "parallelism=fsdp,hsdp", "world=4", "launch=slurm", "cluster=cpu"]
    said = site.titanlab(*words, *SMALL, "sweep=idiom", "notes=fsdp, or hsdp?", "data=planted", seconds=400)
    assert said.code == 0, said.out + said.err
    rows = site.rows("idiom")
    assert {name: (row["layout.label"], row["outcome"], row["world"]) for name, row in rows.items()} == {
        "fsdp": ("dp_s4", "done", 4),
        "hsdp": ("dp_r2·dp_s2", "done", 4),
    }
    assert {row["notes"] for row in rows.values()} == {"fsdp, or hsdp?"}
    assert said.out.endswith("in wandb: titanlab sync idiom, then titanlab workspace idiom\n")
    site.ended("idiom")
    for row in rows.values():
        assert len(offline_files(site.run("idiom", row["name"]).path)) == 1
        (job,) = site.starts(site.run("idiom", row["name"]))
        # Two processes to a node.
        assert (job["State"], job["NNodes"]) == ("COMPLETED", "2")
    assert abs(rows["fsdp"]["loss"] - rows["hsdp"]["loss"]) < 1e-3
    # The same command again finds both runs, and submits nothing.
    again = site.titanlab(*words, *SMALL, "sweep=idiom", "data=planted")
    assert (again.code, len(site.sweep("idiom").submissions())) == (0, 1), again.out + again.err
    # A point that cannot run is an error before any job is submitted.
    wrong = site.titanlab(*words, *SMALL, "sweep=wrong", "data=planted", "training.global_batch=6")
    assert (wrong.code, site.sweep("wrong").submissions()) == (2, [])
    assert "training.global_batch=6" in wrong.err
