"""States of the random generators in a checkpoint: bytes in position.json, so that no pickle is needed to read them.

Older checkpoints have them as tensors, or the states of Python and numpy as pickled objects; these are read without
running code.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titanlab.checkpoint.damage import DamagedCheckpoint
from titanlab.checkpoint.folders import another
from titanlab.checkpoint.older.metadata import SavedState
from titanlab.checkpoint.remote.address_schema import Place
from titanlab.distributed.world import World

_MOST_BYTES = 1 << 16
"""Size limit of one generator's state; the largest, as JSON, takes 8 KiB."""
_WORDS = 624


def generator_states(world: World) -> dict[str, Tensor]:
    """The states of this rank's generators."""
    states = {
        "cpu": torch.get_rng_state(),
        "python": _packed(random.getstate()),
        "numpy": _packed(_plain(np.random.get_state())),  # noqa: NPY002 - third-party code uses this generator
    }
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device)
    return states


def state_bytes(states: Mapping[str, Tensor]) -> dict[str, bytes]:
    """The states as bytes, for position.json."""
    return {name: bytes(state.tolist()) for name, state in states.items()}


def states_of_bytes(states: Mapping[str, bytes], current: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The states as tensors, of the generators that this rank has.

    A checkpoint of fewer ranks or of another device lacks some states; those generators keep the state of the seed.
    """
    return {name: torch.frombuffer(bytearray(states[name]), dtype=torch.uint8) for name in current if states.get(name)}


def saved_states(
    current: Mapping[str, Tensor], saved: SavedState, rank: int, checkpoint: Place, key: str
) -> dict[str, Any]:
    """Make the tensors into which the states of a rank in an older checkpoint are read; empty if it has none.

    A checkpoint of fewer ranks or of another device lacks some states; those generators keep the state of the seed.

    Raises:
        DamagedCheckpoint: an entry of the checkpoint is not the state of a generator.
    """
    states: dict[str, Any] = {}
    for name, state in current.items():
        entry = f"generators.{rank}.{name}"
        if entry in saved.objects and name in ("python", "numpy"):
            states[name] = None
        elif entry in saved.tensors:
            tensor = saved.tensors[entry]
            if tensor.dtype != "uint8" or len(tensor.size) != 1 or tensor.size[0] > _MOST_BYTES:
                raise DamagedCheckpoint(key, checkpoint, f"{entry} is no state of a generator", another(checkpoint))
            states[name] = torch.empty(tensor.size, dtype=state.dtype)
    return states


def restore_generators(states: Mapping[str, Any], world: World, checkpoint: Place, key: str) -> None:
    """Set the generators to the states.

    Raises:
        DamagedCheckpoint: a state is not valid.
    """
    try:
        set_generators(states, world)
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, RuntimeError) as error:
        rule = f"holds no state of a generator ({type(error).__name__})"
        raise DamagedCheckpoint(key, checkpoint, rule, another(checkpoint)) from error


def set_generators(states: Mapping[str, Any], world: World) -> None:
    """Set the generators to states of `generator_states`."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "python" in states:
        version, words, gauss = _unpacked(states["python"])
        random.setstate((version, tuple(words), gauss))
    if "numpy" in states:
        kind, words, position, has_gauss, gauss = _unpacked(states["numpy"])
        # numpy does not check the position, and could read memory behind the words.
        if len(words) != _WORDS or not 0 <= position <= _WORDS:
            raise ValueError("no state of numpy's generator")
        np.random.set_state((kind, np.array(words, np.uint32), position, has_gauss, gauss))  # noqa: NPY002
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], world.device)


def _plain(state: Any) -> tuple[Any, ...]:
    kind, words, position, has_gauss, gauss = state
    return kind, words.tolist(), position, has_gauss, gauss


def _packed(state: Any) -> Tensor:
    """Encode a state as the bytes of its JSON, in which numbers are exact."""
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def _unpacked(state: Any) -> Any:
    return json.loads(bytes(state.tolist())) if isinstance(state, Tensor) else state
