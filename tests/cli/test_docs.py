"""Every command in the docs, the help texts and the comments of configs: it can be typed as it is written.

A page's commands are taken in their order, in an empty folder, by the verbs' own code. Nothing is trained: a recipe is
composed and held to every rule that needs no prepared data, on a host with a CPU only, or else with eight GPUs.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from tests.cli.test_bad_input import words
from titanlab.cli import main
from titanlab.cli import sweep as sweep_verb
from titanlab.cli.verbs import VERBS
from titanlab.composition.errors import composition_errors
from titanlab.composition.flags import read_flags
from titanlab.composition.recipes import conf_folder, to_recipe
from titanlab.errors import ConfigError
from titanlab.execute import prepare
from titanlab.host import Host
from titanlab.sweep.study.hydra_loader import Loader
from titanlab.sweep.study.plan import plan_study
from titanlab.sweep.study.request import read_request

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Comments and help texts have commands of their own, with what they do beside them.
TEXTS = [*sorted(conf_folder().rglob("*.yaml")), *sorted((ROOT / "sweeps").glob("*.yaml"))]
CPU = Host(accelerator="cpu", device="cpu", count=2)
GPUS = Host(accelerator="cuda", device="NVIDIA H100 80GB HBM3", count=8)
# What a page does before: it makes a folder or a file.
MAKES = ("mkdir ", "python -c ")
# Words that stand for something of the reader's own.
OWN = re.compile(r"…|\b[A-Z]{3,}\b(?!=)|my/|my_site|my_cluster|mine\b|~/|path/to|weights/|llama_2/|runs/single/small")


class Typed(NamedTuple):
    """A command of a page.

    Attributes:
        error: the line with which the page says that it is refused; empty: it is not.
    """

    command: str
    error: str


def commands(path: Path) -> list[Typed]:
    """The commands of a page's code blocks, without prompts."""
    found: list[Typed] = []
    for block in re.findall(r"^```\w*\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        lines = [line.removeprefix("$ ") for line in block.replace("\\\n", " ").splitlines()]
        for line, following in zip(lines, [*lines[1:], ""], strict=True):
            if line.startswith(("titanlab ", "torchrun ", *MAKES)) and " · " not in line:
                found.append(Typed(line, following if following.startswith("error: ") else ""))
    return found


def texts() -> Iterator[tuple[str, str]]:
    """Commands in comments of configs and in the pages of help: what does it, two spaces, what it does."""
    lines = [(path.name, line.lstrip("# ")) for path in TEXTS for line in path.read_text("utf-8").splitlines()]
    lines += [("sweep --help", line.strip()) for line in sweep_verb._HELP.splitlines()]
    lines += [("--help", text.partition(": ")[2]) for _, text in VERBS.values()]
    for name, line in lines:
        if (
            line.startswith("titanlab ")
            and "[" not in line
            and not line.startswith(("titanlab train: ", "titanlab sweep: "))
        ):
            yield name, re.split(r"\s{2,}", line)[0]


def hold_recipe(typed: list[str], **environ: str) -> None:
    """Compose the recipe of a `train`, and hold it to the rules, as a CPU's or a GPU's."""
    flags = read_flags(typed)
    loader = Loader(flags, flags.overrides)
    with composition_errors(flags.overrides, flags.values):
        composed = loader.compose([])
        recipe = to_recipe(composed.config, composed.choices, loader.config_name)
    if not flags.starts:
        return
    for host in (CPU, GPUS):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            patch.setattr("titanlab.execute.this_host", lambda host=host: host)
            patch.setattr("titanlab.execute._with_data", lambda recipe, *given, **more: recipe)
            try:
                prepare([recipe], print)
                return
            except ConfigError as error:
                # What needs a GPU is held on a host with some.
                if host is GPUS or error.key != "cluster.accelerator":
                    raise


def hold(command: str, *, every_point: bool = False) -> None:
    """Type a command.

    Args:
        every_point: of a sweep, all points are planned, and not only its file read.

    Raises:
        ConfigError: it is refused.
    """
    if command.startswith(MAKES):
        subprocess.run(["bash", "-c", command.replace("python -c", f"{shlex.quote(sys.executable)} -c")], check=True)
        return
    typed = shlex.split(command, comments=True)
    if typed[0] == "torchrun":
        if "titanlab" not in typed:
            return
        ranks = typed[typed.index("--nproc-per-node") + 1]
        names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        hold_recipe(typed[typed.index("train") + 1 :], **names, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
        return
    verb, given = typed[1], typed[2:]
    if verb == "train" and "-m" not in given and "launch=slurm" not in given:
        hold_recipe(given)
    elif verb in ("train", "sweep"):
        rest = [word for word in given if word not in ("--wait", "--dry-run", "-m")]
        if every_point:
            plan(rest, whole=verb == "train")
        else:
            read_request(rest)
    elif verb == "schedule":
        assert main([verb, *given]) == 0
    else:
        hold_arguments(verb, given)


def plan(typed: list[str], *, whole: bool) -> None:
    for host in (CPU, GPUS):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("titanlab.sweep.study.plan.this_host", lambda host=host: host)
            try:
                plan_study(typed, whole=whole)
                return
            except ConfigError:
                if host is GPUS:
                    raise


def hold_arguments(verb: str, given: list[str]) -> None:
    """Verbs that ask for runs, weights or a network: their flags are their own, and nothing else is wrong."""
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("titanlab.cli.verbs.error_line", said.append)
        patch.setattr("titanlab.cli.download_tokenizer.download_tokenizer", made_tokenizer)
        patch.setattr("titanlab.cli.tokenize.write_token_shards", made_shards)
        main([verb, *given])
    refused = [line for line in said if line.startswith(("arguments=", "verb=", "--", "overrides="))]
    assert not refused


def made_tokenizer(repo: str, folder: Path, *given: object, **more: object) -> Path:
    """A folder with a tokenizer, of three words."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(words()))
    return folder


def made_shards(files: str, folder: Path, **given: object) -> SimpleNamespace:
    """Shards as the verb makes them, of no tokens that mean anything."""
    folder.mkdir(parents=True)
    (folder / "train.bin").write_bytes(bytes(200_000))
    vocabulary = given["vocab_size"] if given["tokenizer"] is None else 2048
    index = {"format": "titanlab-tokens", "version": 1, "dtype": "uint16", "vocab_size": vocabulary}
    index["train"] = [{"file": "train.bin", "tokens": 100_000}]
    (folder / "index.json").write_text(json.dumps(index))
    return SimpleNamespace(vocab_size=vocabulary)


@pytest.mark.full
@pytest.mark.parametrize("page", ["data.md", "schedules.md"])
def test_a_page_that_makes_files_runs_whole(here, page):
    """As processes, in the page's order; training takes three steps, and what needs a network is left out."""
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    short = "training.steps=3 training.seq_len=64 checkpoint.at_end=false"
    for command, _ in commands(ROOT / "docs" / page):
        line = command.partition(" #")[0].strip()
        if "Llama-3.1" in line:
            continue
        line = f"{line} {short}" if line.startswith("titanlab train") else line
        done = subprocess.run(
            ["bash", "-c", line], env=environ, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.full
def test_every_sweep_of_the_docs_can_be_planned(here, capsys):
    typed = {each.command.partition(" #")[0].strip() for page in PAGES for each in commands(page)}
    typed |= {command for _, command in texts()}
    sweeps = [each for each in sorted(typed) if re.match("titanlab (sweep|train -m) ", each) and not OWN.search(each)]
    assert len(sweeps) > 10
    refused = []
    for command in sweeps:
        try:
            hold(command, every_point=True)
        except ConfigError as error:
            refused.append(f"{command}\n    {error}")
    assert not refused, "\n".join(refused)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_command_of_a_page_is_accepted(here, page, capsys):
    wrong = []
    for command, error in commands(page):
        if OWN.search(command.partition(" #")[0]):
            continue
        said = ""
        try:
            hold(command)
        except ConfigError as refused:
            said = f"error: {refused}"
        if said != error:
            wrong.append(f"{command}\n    {said}")
    assert not wrong, "\n".join(wrong)


def test_every_command_of_configs_and_of_the_help_is_accepted(here, capsys):
    refused = []
    found = list(texts())
    assert len(found) > 15
    for name, command in found:
        if not OWN.search(command):
            try:
                hold(command)
            except ConfigError as error:
                refused.append(f"{name}: {command}\n    {error}")
    assert not refused, "\n".join(refused)


def test_commands_that_are_wrong_are_found(here):
    for command in ("titanlab train training.stepz=3", "titanlab sweep +sweeps=nope", "titanlab schedule nope"):
        with pytest.raises((ConfigError, AssertionError)):
            hold(command)
    for command in ("titanlab retry lay --al-failed", "titanlab nope"):
        with pytest.raises(AssertionError):
            hold(command)
