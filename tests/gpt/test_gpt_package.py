"""The package as another's: installed for good, found by its entry points, run as whole processes; and its page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from tiny_gpt import gpt
from tiny_gpt.gpt_schema import Gpt

from tests.docs.pages import commands
from tests.extending.test_extending import prints
from tests.gpt.conftest import PACKAGE
from titanlab.data import Synthetic
from titanlab.errors import ConfigError
from titanlab.train.conformance import faults

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models-of-your-own.md").read_text()
# A block of code with the file from which it was taken.
BLOCK = re.compile(r"<!-- (?P<file>\S+) -->\n```\w+\n(?P<code>.*?)```", re.DOTALL)
KEYS = (
    "model=gpt_tiny data=synthetic training.steps=3 training.seq_len=32 training.global_batch=8 "
    "optimizer.schedule.warmup_steps=2 cluster.accelerator=cpu cluster.peak_tflops=1 world=2"
)


def run(*command, site, folder):
    environment = {**os.environ, "PYTHONPATH": f"{site}:{ROOT}"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of packages in which pip has installed it."""
    folder = tmp_path_factory.mktemp("site")
    how = (
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "--no-warn-script-location",
    )
    subprocess.run([sys.executable, "-m", "pip", "install", *how, "--target", folder, PACKAGE], check=True, timeout=120)
    return folder


@pytest.mark.full
def test_the_installed_model_trains(site, tmp_path):
    keys = [*KEYS.split(), "parallelism.tensor=2"]
    done = run(sys.executable, "-m", "titanlab", "train", *keys, site=site, folder=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "gpt, 2 layers of 64, vocabulary 256" in done.stdout + done.stderr
    (folder,) = (tmp_path / "runs" / "single").iterdir()
    assert (folder / "result.json").is_file()


@pytest.mark.full
def test_the_page_begins_with_a_command_and_what_it_prints(site, tmp_path):
    command = commands("docs/models-of-your-own.md")[0]
    titanlab, *arguments = command.text.split()
    assert (titanlab, arguments[:2]) == ("titanlab", ["train", "model=gpt_tiny"])
    done = run(sys.executable, "-m", titanlab, *arguments, site=site, folder=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert prints(done.stdout + done.stderr, command.shown), done.stdout + done.stderr


@pytest.mark.full
def test_its_other_options_are_heard(site, tmp_path):
    keys = [
        *KEYS.split(),
        "ac=first_blocks",
        "ac.count=2",
        "precision=fp64",
        "parallelism.shard=2",
        "training.seq_len=129",
    ]
    refused = run(sys.executable, "-m", "titanlab", "train", *keys, site=site, folder=tmp_path)
    assert refused.stderr.endswith(
        "error: training.seq_len=129: is longer than the 128 positions that the model learns; try 128\n"
    )
    assert refused.returncode == 2
    done = run(sys.executable, "-m", "titanlab", "train", *keys[:-1], site=site, folder=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.full
def test_the_pages_proof_proves(site, tmp_path):
    (code,) = (block["code"] for block in BLOCK.finditer(PAGE) if block["file"] == "prove.py")
    (tmp_path / "prove.py").write_text(code)
    lines = re.search(r"```\nkeys=\"(?P<keys>.*?)\"\n(?P<commands>.*?)```", PAGE, re.DOTALL)
    for command in lines["commands"].splitlines():
        words = command.replace("$keys", lines["keys"] + " cluster.accelerator=cpu cluster.peak_tflops=1").split()
        assert words[0] == "torchrun"
        done = run(sys.executable, "-m", "torch.distributed.run", *words[1:], site=site, folder=tmp_path)
        assert done.returncode == 0, done.stderr + done.stdout
    assert re.search(r"loss \S+, grad norm \S+, gradient \S+ \(\S+\), parameter \S+ \(\S+\)", done.stdout)


def test_the_page_shows_what_the_package_has():
    blocks = [block for block in BLOCK.finditer(PAGE) if block["file"] != "prove.py"]
    assert len(blocks) >= 9
    for block in blocks:
        assert block["code"] in (PACKAGE / block["file"]).read_text(), block["code"]
    # Every file that it names is there.
    for name in re.findall(r"^ +(\S+\.(?:py|yaml|toml))\b", PAGE, re.MULTILINE):
        assert list(PACKAGE.rglob(Path(name).name)), name


# The account of a model from outside


SIZES = {"width": 24, "depth": 3, "heads": 4, "places": 20, "vocab_size": 50}


@pytest.mark.parametrize("tied", [False, True])
def test_the_gpt_is_what_its_account_says(tied):
    assert faults(Gpt(**SIZES, tied_head=tied)) == []


def test_the_yaml_makes_one():
    values = yaml.safe_load((Path(gpt.__file__).parent / "conf/model/gpt_tiny.yaml").read_text())
    assert values.pop("defaults") == ["gpt_schema", "_self_"]
    assert Gpt(**values).account().parameter_count == 141_184


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"lookups": ()}, "FLOPs: the sizes in the account make"),
        ({"tensor_plan": {"norm": "norm"}}, "tensor_plan: nothing is said about head.bias"),
    ],
)
def test_what_is_wrong_in_an_account_is_found(given, fault):
    with patch.object(Gpt, "account", lambda config, right=Gpt.account: replace(right(config), **given)):
        assert any(each.startswith(fault) for each in faults(Gpt(**SIZES)))


def test_a_model_that_says_it_masks_documents_is_asked_to(monkeypatch):
    monkeypatch.setattr(Gpt, "masks_documents", True)

    def forward(model, tokens, positions=None, starts=None, right=gpt.GptModel.forward):
        return right(model, tokens, positions)

    monkeypatch.setattr(gpt.GptModel, "forward", forward)
    assert faults(Gpt(**SIZES)) == ["documents: with starts, a document's logits are not those of the document alone"]


def test_document_masks_need_a_model_that_has_them(tmp_path):
    from tests import tiny

    data = Synthetic(vocab_size=256, document_mask=True)
    with pytest.raises(
        ConfigError, match=r"^data.document_mask=true: model=.*gpt.* does not mask documents; try false"
    ):
        tiny.recipe(tmp_path, seq_len=16, model=Gpt(**{**SIZES, "vocab_size": 256}), data=data)


def test_the_models_own_rules_are_heard(tmp_path):
    from tests import tiny

    with pytest.raises(
        ConfigError, match=r"training.seq_len=32: is longer than the 20 positions that the model learns; try 20"
    ):
        tiny.recipe(tmp_path, model=Gpt(**{**SIZES, "vocab_size": 256}))
