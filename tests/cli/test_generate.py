"""`titanlab generate`: what it refuses, what it hands to the sampling, and what it prints."""

import pytest

from titanlab.cli.verbs import call
from titanlab.distributed import Host


@pytest.fixture
def sampled(monkeypatch):
    """Stands in for the sampling: it gives these pieces, and keeps what it was called with."""
    calls, pieces = [], ["c", "d é", "f"]

    def sample(folder, prompt, **given):
        calls.append((folder, prompt, given))
        yield from pieces

    monkeypatch.setattr("titanlab.train.generate.generate", sample)
    return calls, pieces


def test_the_prompt_and_its_continuation_are_one_line(saved_run, sampled, shown):
    assert shown("generate", str(saved_run), "--prompt", "ab ") == "ab cd éf\n"
    sampled[1].clear()
    assert shown("generate", str(saved_run), "--prompt", "ab ") == "ab \n"


def test_flags_are_those_of_the_sampling(saved_run, sampled, here):
    # By its name, in a folder of runs.
    flags = "--runs ../runs --prompt x --tokens 7 --temperature 0 --top-k 0 --seed 3 --device cpu"
    assert call(["generate", saved_run.name, *flags.split()]) == 0
    ((folder, prompt, given),) = sampled[0]
    assert (folder.resolve(), prompt) == (saved_run, "x")
    assert callable(given.pop("warn"))
    assert given == {"tokens": 7, "temperature": 0.0, "top_k": 0, "seed": 3, "device": "cpu"}


def test_the_graphics_card_is_used_where_there_is_one(saved_run, sampled, monkeypatch):
    monkeypatch.setattr("titanlab.cli.weights.this_host", lambda: Host(accelerator="cuda", device="H100", count=1))
    assert call(["generate", str(saved_run), "--device", "cuda"]) == 0
    assert sampled[0][0][2]["device"] == "cuda"


def test_a_folder_of_weights_needs_no_run(sampled, here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    folder = here / "weights"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"")
    assert call(["generate", "~/weights"]) == 0
    assert sampled[0][0][0] == folder
