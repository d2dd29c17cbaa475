"""Sampling: text from a run's checkpoint, or from a folder of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from titanlab.checkpoint import Place, find, read_contents, read_while_kept
from titanlab.data import tokenizers
from titanlab.distributed import ALONE, open_world
from titanlab.errors import ConfigError
from titanlab.recipe import Recipe, frozen_recipe
from titanlab.records import RunFolder
from titanlab.techniques.model.language_model import LanguageModel, shapes_only
from titanlab.techniques.precision.cast import dtype_named
from titanlab.train.assemble import default_dtype
from titanlab.train.dcp import source_of
from titanlab.train.initialise import fill
from titanlab.train.totals import set_biases
from titanlab.train.weights import CONTEXT, WeightsSource, is_hf_folder, is_weights_folder, open_folder

# Limit of the context in tokens: each new token recomputes the whole context, and a folder may allow 131,072 tokens.
_MOST_CONTEXT = 4096


def generate(
    run: Path,
    prompt: str,
    *,
    tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    device: str = "cpu",
    warn: Callable[[str], None] = lambda line: None,
) -> Iterator[str]:
    """Sample text after the prompt; yields it piece by piece.

    Args:
        run: the folder of a run, whose latest checkpoint is used; or a folder of weights, imported or Hugging Face's.
        tokens: largest number of tokens to sample; an end-of-text token ends earlier.
        temperature: 0 takes the likeliest token every time.
        top_k: sample only among this many likeliest tokens; 0: among all.

    Raises:
        ConfigError: the run has no checkpoint, or its data has no tokenizer.
    """
    source = open_folder(run, "run")
    tokenizer = tokenizers.load(_tokenizer_folder(run), "run")
    with open_world(ALONE, accelerator=device, seed=seed, deterministic=False) as world:
        if source is not None:
            seq_len = min(int(source.about.get(CONTEXT, _MOST_CONTEXT)), _MOST_CONTEXT)
            model = _filled(source, seq_len, getattr(torch, source.usual_dtype), world.device)
        else:
            recipe = frozen_recipe(RunFolder(run))
            seq_len = recipe.training.seq_len
            model = read_while_kept(
                lambda: find(str(run), "run"), lambda checkpoint: _load(recipe, checkpoint, world.device), warn
            )
    ids = tokenizer.encode(prompt)
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    if not (begin or ids):
        raise ConfigError("--prompt", prompt, "is empty, and this tokenizer has no beginning of text", "give a prompt")
    generator = torch.Generator(world.device).manual_seed(seed)
    # Decode new tokens together with the prompt: decoded alone, their first word would lose the space before it.
    shown = len(tokenizer.decode(ids))
    for _ in range(tokens):
        context = [*begin, *ids][-seq_len:]
        token = _next(model, context, temperature, top_k, generator, tokenizer.vocab_size)
        if token == tokenizer.eos_id:
            break
        ids.append(token)
        # The bytes of one character may be in several tokens: yield whole characters only.
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):
            yield text[shown:]
            shown = len(text)


def _tokenizer_folder(run: Path) -> Path:
    if is_hf_folder(run):
        return run
    folder = RunFolder(run).tokenizer
    if not folder.is_dir():
        if is_weights_folder(run):
            raise ConfigError("run", run, "has no tokenizer", "import a model whose folder has one")
        raise ConfigError("run", run, "was trained on data without a tokenizer", "train on data=stdlib or data=files")
    return folder


def _load(recipe: Recipe, checkpoint: Place, device: torch.device) -> LanguageModel:
    source, dtype = source_of(read_contents(checkpoint, "run"), recipe.model), recipe.precision.formats().master
    return _filled(source, recipe.training.seq_len, dtype_named(dtype), device)


def _filled(source: WeightsSource, seq_len: int, dtype: torch.dtype, device: torch.device) -> LanguageModel:
    with shapes_only(), default_dtype(dtype):
        model = source.model.implementation().build(seq_len=seq_len)
    model.to_empty(device=device)
    model.init_buffers(device)
    model.eval()
    fill(model, source)
    set_biases(model, source.biases)
    return model


@torch.inference_mode()
def _next(
    model: nn.Module, ids: list[int], temperature: float, top_k: int, generator: torch.Generator, vocab_size: int
) -> int:
    tokens = torch.tensor([ids], device=generator.device)
    # The model's vocabulary may be padded beyond the tokenizer's.
    logits = model(tokens)[0, -1, :vocab_size].float()
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        cut = logits.topk(min(top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < cut, float("-inf"))
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
