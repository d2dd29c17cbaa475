"""What ranks do before their first step, and what they leave out: it takes processor time in every run."""

import json
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from tests import tiny
from tests.test_layers import HEAVY
from titanlab.distributed.start_up import FILE, PHASES
from titanlab.launch import import_techniques
from titanlab.launch import processes as local

# What a plain run does not need: each takes a tenth of a second or more to import.
UNNEEDED = {
    *(HEAVY - {"torch"}),
    *("hydra", "rich", "scipy", "transformers", "IPython"),
    *("torch._inductor.compile_fx", "torch.distributed.pipelining", "torch.utils.tensorboard"),
    *("torch.testing._internal.common_utils", "torch.ao.quantization.fx"),
}
# A build of torch for GPUs, which brings Triton, imports it with its compiler.
if torch.version.cuda is None:
    UNNEEDED.add("triton")

# A worker that notes what was collected while it imported, and what is imported after the fork and by the first step.
WORKER = """
    import gc, json, os, sys
    from pathlib import Path
    from titanlab.launch.rank import rank

    shared, collections = set(), []
    os.register_at_fork(after_in_child=lambda: shared.update(sys.modules))
    import_trainer = rank.import_trainer

    def watched():
        before = [each["collections"] for each in gc.get_stats()]
        import_trainer()
        collections.extend(each["collections"] - old for each, old in zip(gc.get_stats(), before))

    def observe(recipe, run, ranks):
        from titanlab.train.train import Observer

        class Noting(Observer):
            def after_step(self, step, totals):
                noted = {
                    "modules": sorted(sys.modules),
                    "own": sorted(set(sys.modules) - shared),
                    "collections": collections,
                    "kept": gc.get_freeze_count(),
                    "enabled": gc.isenabled(),
                }
                (Path(run.path) / f"noted-{ranks.rank}.json").write_text(json.dumps(noted))

        return Noting()

    rank.import_trainer = watched
    os._exit(rank.main(sys.argv[1:], observe=observe))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks are not forked")
def test_two_ranks_share_their_imports_and_collect_nothing_while_they_import(monkeypatch, tmp_path):
    made = tiny.recipe(tmp_path, shard=2, steps=2, saves="off")
    run = tiny.begin(made)
    command = [sys.executable, "-c", textwrap.dedent(WORKER)]
    monkeypatch.setattr(local, "worker_command", lambda folder: [*command, str(folder)])
    assert local.start(run.path, attempt=1, world=2, logs=run.logs) == []
    for rank in range(2):
        noted = json.loads((run.path / f"noted-{rank}.json").read_text())
        assert UNNEEDED & set(noted["modules"]) == set()
        # The techniques and all of torch are imported once for both.
        own = {".".join(name.split(".")[:2]) for name in noted["own"]}
        parts = ("model", "precision", "ac", "optimizer", "parallelism", "train", "launch", "recipe")
        assert own & {f"titanlab.{part}" for part in parts} == set()
        assert [name for name in noted["own"] if name.startswith(("torch.", "sympy")) and "cupti" not in name] == []
        assert set(noted["collections"]) == {0}
        assert noted["kept"] > 100_000
    start_up = json.loads((run.attempt_folder(1) / FILE).read_text())
    assert list(start_up["seconds"]) == list(PHASES)
    assert all(seconds >= 0 for seconds in start_up["seconds"].values())
    assert start_up["total"] == pytest.approx(sum(start_up["seconds"].values()), abs=1e-3)


def test_a_technique_that_cannot_be_imported_is_left_to_the_ranks():
    """Each of them records the failure."""
    imported = []

    def technique(name):
        return SimpleNamespace(implementation=lambda: imported.append(name), layer_class=None)

    def absent():
        raise ImportError("a planted fault")

    techniques = {name: technique(name) for name in ("model", "precision", "ac", "optimizer")}
    import_techniques(SimpleNamespace(**techniques, layout=SimpleNamespace(pipeline=1)))
    assert sorted(imported) == sorted(techniques)
    techniques["precision"].implementation = absent
    import_techniques(SimpleNamespace(**techniques, layout=SimpleNamespace(pipeline=1)))
