"""A reader who types what a page says, in this process: all is checked as for a real start, and nothing starts."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.docs.given import write_tokenizer
from titanlab.cli import main
from titanlab.data import source
from titanlab.distributed import Host
from titanlab.launch import prepare
from titanlab.launch.execute import Ready
from titanlab.prove import ProofRow, Reduced
from titanlab.prove.forked import Ended
from titanlab.recipe import Recipe, to_mapping
from titanlab.records import Outcome, OutcomeKind, RunFolder, create_run, find_run
from titanlab.sweep import check_study, plan
from titanlab.sweep.request import Request

LAPTOP = Host(accelerator="cpu", device="cpu", count=2)
GPUS = Host(accelerator="cuda", device="NVIDIA H100 80GB HBM3", count=8)
# Recipes for GPUs are started on them, and sweeps for GPUs that name no launcher. Twins, whose names end in `_cpu`, run
# anywhere.
_FOR_GPUS = re.compile(r"\+recipe=\w+gpus(?!\w*_cpu)|\+sweeps=\w+gpus_layouts(?!.* launch=)")
# Words that stand for something of the reader's own, and what it is here (tests/docs/given.py).
VALUES = {
    r"--config-dir FOLDER\b": "--config-dir groups",
    r"\bFOLDER\b": "made-here",
    r"\bSWEEP\b": "layouts",
    r"\bRUN\b": "hang",
    r"\bNAME\b": "quickstart",
    r"(?<=--step )N\b": "10",
    r"hf_…": "hf_token",
}
# First digits of the hash of a run, which has others here.
_DIGITS = re.compile(r"(?<=SWEEP fsdp-bf16 )[0-9a-f]{4}\b")
_OPTIONAL = re.compile(r"(?<= )\[([A-Z-][^]]*)\]")
_ASSIGNMENT = re.compile(r"[A-Za-z_]+=")


@dataclass(frozen=True)
class Said:
    """What a command came to."""

    code: int
    out: str
    err: str


class Reader:
    """Types commands in a folder that has what readers have by then."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder = folder
        self._patch = patch
        self._capsys = capsys
        self._host = LAPTOP
        # Whether something was put in the place of what the latest command does.
        self.stood_in = False
        self._stand_in()

    def types(self, text: str) -> Said:
        """Run one command of titanlab, which is read as a shell reads it: quotes, variables of its own, comments."""
        environ, arguments = self._read(text)
        self._host = GPUS if _FOR_GPUS.search(text) else LAPTOP
        # Both begin with everything that a submission begins with.
        if arguments[0] in ("sweep", "retry") and not {"--dry-run", "--help", "--cfg"} & {*arguments}:
            arguments = [*(word for word in arguments if word != "--wait"), "--dry-run"]
        self.stood_in = False
        self._capsys.readouterr()
        with self._patch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            code = main(arguments)
        return Said(code, *self._capsys.readouterr())

    def _read(self, text: str) -> tuple[dict[str, str], list[str]]:
        """Variables of a command line, and the arguments of titanlab."""
        if asked := re.fullmatch(r'eval "\$\((titanlab .*)\)"', text):
            text = asked[1]
        digits = next((self._folder / "runs" / "layouts").glob("hang-*")).name[-8:-4]
        text = _DIGITS.sub(digits, text)
        # What is in brackets may be left out; the more there is, the more is checked.
        text = _OPTIONAL.sub(r"\1", text)
        for word, value in VALUES.items():
            text = re.sub(word, value, text)
        words = shlex.split(text, comments=True)
        environ = {}
        while _ASSIGNMENT.match(words[0]):
            name, _, value = words.pop(0).partition("=")
            environ[name] = value
        if words[0] == "torchrun":
            count = words[words.index("--nproc-per-node") + 1]
            environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
            words = words[words.index("-m") + 1 :]
        assert words[0] == "titanlab", f"{text}: is not a command of titanlab"
        return environ, [os.path.expanduser(word) for word in words[1:] if word != "…"]

    def _stand_in(self) -> None:
        """In place of what trains, submits, reads checkpoints, or asks a network."""
        patch = self._patch.setattr
        for module in ("titanlab.launch.execute", "titanlab.cli.weights", "titanlab.sweep.plan"):
            patch(f"{module}.this_host", lambda: self._host)
        patch("titanlab.launch.execute.execute", began)
        patch("titanlab.cli.environment.checks", lambda *given, **more: [])
        patch("titanlab.cli.resume.find_run_or_checkpoint", found)
        patch("titanlab.cli.resume.check_beginning", lambda recipe: None)
        patch("titanlab.cli.resume.continue_run", lambda *given, **more: Outcome(kind=OutcomeKind.DONE))
        patch("titanlab.cli.resume.resubmit", lambda *given, **more: None)
        patch("titanlab.cli.resume.prepare", prepared_run)
        patch("titanlab.cli.resume.execute", lambda ready, console: Outcome(kind=OutcomeKind.DONE))
        patch("titanlab.cli.resume._submitted", lambda recipe, console: 0)
        # What is written does not depend on whether Slurm is here.
        patch("titanlab.cli.sweep.check_study", lambda study: check_study(study, submits=False, answered=False))
        patch("titanlab.cli.sweep.submit", lambda study, report, *, force: SimpleNamespace(folder=None, decisions=()))
        # The first point of many may be one that does not fit: tests/sweep/study leaves such points out.
        patch("titanlab.cli.sweep.fitting", lambda study, *, strictly: study)
        patch("titanlab.cli.sweep._report", lambda *given, **named: None)
        patch("titanlab.cli.sweep.follow", lambda folder: [])
        # tests/cli/proofs trains.
        patch("titanlab.cli.proofs.prepare", lambda: None)
        patch("titanlab.cli.proofs.Prover", lambda trainer: SimpleNamespace(rows=self._proved))
        patch("titanlab.cli.proofs.train_in_ranks", self._rehearsed)
        read_request = plan.read_request
        patch(plan, "read_request", lambda *given, **named: shortened(read_request(*given, **named)))
        patch(source, "prepare", prepared)
        patch(source, "fingerprint", fingerprinted)
        patch("titanlab.cli.weights.find", lambda folder, key: None)
        said = SimpleNamespace(generate=lambda *given, **more: iter(["…"]))
        self._patch.setitem(sys.modules, "titanlab.train.generate", said)
        made = SimpleNamespace(kind="wandb", rows=3, folder=self._folder / "wandb")
        patch("titanlab.train.rebuild", lambda run, *given: [made])
        patch("titanlab.cli.weights.checkpoint_of", lambda text, runs, *, step: find_run(text, runs))
        patch("titanlab.cli.weights.from_run", lambda text, runs, checkpoint: find_run(text, runs))
        patch("titanlab.cli.weights.write_hf", lambda origin, into, **given: self._exported(into))
        patch("titanlab.cli.weights.fetch_model", lambda name, **given: Path("given/small-hf"))
        patch("titanlab.cli.tokens.download_tokenizer", downloaded)

    def _proved(self, proof: Reduced) -> list[ProofRow]:
        self.stood_in = True
        assert proof.recipe is not None, proof.error
        return [ProofRow(run=proof.run, layout=proof.layout, precision="fp32", passed=True)]

    def _rehearsed(self, recipe: Recipe) -> Ended:
        self.stood_in = True
        run = RunFolder(Path(recipe.runs) / recipe.name)
        return Ended(run=run, attempt=1, outcome=Outcome(kind=OutcomeKind.DONE), seconds=1.0)

    def _exported(self, into: Path) -> None:
        self.stood_in = True
        os.symlink(self._folder / "given" / "small-hf", into)


_prepare, _fingerprint = source.prepare, source.fingerprint
_of_stdlib: dict[str, str] = {}


def prepared(data: Any, *, report: Any) -> None:
    """Nothing is fetched; and the standard library, which is the same for all, is looked through once."""
    if data.kind != "hf" and repr(data) not in _of_stdlib:
        _prepare(data, report=report)


def fingerprinted(data: Any) -> str:
    if data.kind != "stdlib":
        return _fingerprint(data)
    if repr(data) not in _of_stdlib:
        _of_stdlib[repr(data)] = _fingerprint(data)
    return _of_stdlib[repr(data)]


def shortened(request: Request) -> Request:
    """The first point of many: tests/sweep plans every file whole."""
    return replace(request, points=request.points[:1]) if len(request.points) > 4 else request


def found(text: str, runs: str, key: str = "") -> tuple[RunFolder, Path | None]:
    """The run of a checkpoint that need not be there; `train --from`, which names its key, finds one of it."""
    return find_run(text.partition("/checkpoints/")[0], runs), Path("step-00000008") if key else None


def prepared_run(recipes: Any, report: Any, **more: Any) -> Any:
    """What `resume` prepares; nothing for `train --from`, whose checkpoint is not there."""
    return prepare(recipes, report, **more) if more else [None]


def began(ready: Ready, console: Any) -> Outcome:
    """The run's folder is there, as after a start."""
    recipe = ready.recipe
    create_run(recipe.runs, sweep=recipe.sweep, name=recipe.name, identity=ready.identity, config=to_mapping(recipe))
    return Outcome(kind=OutcomeKind.DONE)


def downloaded(repo: str, folder: Path, token: str | None, *, report: Any) -> Path:
    """As many tokens as that of Llama 3 has."""
    return write_tokenizer(folder, 128_256)
