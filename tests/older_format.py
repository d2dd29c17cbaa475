"""Checkpoints of the older format: `.metadata`, `*.distcp` and `position.json`, by `dcp.save`."""

import itertools
import os
from dataclasses import asdict
from unittest.mock import patch

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from titanlab.checkpoint import store
from titanlab.checkpoint.folders import step_folder
from titanlab.checkpoint.store import generator_states
from titanlab.distributed.ranks import ALONE, joined
from titanlab.prove.parity import trace
from titanlab.system.files import write_json


def trained(made, run):
    """As a rank: train a run that saves its checkpoints in the older format. Returns its losses."""
    with patch.object(store, "save", save):
        return trace(made, run, joined(os.environ) or ALONE).losses


def save(folder, position, *, model, optimizer, world, keep, recipe=None, **more):
    """In place of `store.save`."""
    final = step_folder(folder, position.step)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=flat)
    states = {"model": model_state, "optimizer": optimizer_state}
    states["generators"] = {str(world.rank): generator_states(world)}
    dcp.save(states, checkpoint_id=final)
    shapes = world.gather([(name, list(parameter.shape)) for name, parameter in model.named_parameters()])
    if world.logs:
        files = {path.name: path.stat().st_size for path in sorted(final.iterdir())}
        content = {**asdict(position), "parameters": dict(itertools.chain.from_iterable(shapes)), "files": files}
        write_json(final / "position.json", content)
    world.share(None)
    return final
