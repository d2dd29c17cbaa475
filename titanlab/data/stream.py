"""The contract between data and the trainer: batches, and a position that can be saved and resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from titanlab.errors import ConfigError, DamagedPosition

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Tokens = npt.NDArray[np.int64]

IGNORE = -100
"""A label that does not count in the loss; the `ignore_index` of torch's cross entropy."""

State = dict[str, Any]
Report = Callable[[str], None]


class Batch(NamedTuple):
    """One rank's share of a global batch.

    Attributes:
        tokens: int64 `[local_batch, seq]`.
        labels: int64 `[local_batch, seq]`; the label at a position is the next token.
    """

    tokens: Tokens
    labels: Tokens


class Stream(Protocol):
    """An endless sequence of batches for one rank.

    Sample g of the global order belongs to rank g % ranks; a rank's samples come in increasing g.
    """

    def next_batch(self) -> Batch:
        """This rank's sequences of the next step."""
        ...

    def state(self) -> State:
        """This rank's part of the position after the last batch, as JSON; see `merge_states`."""
        ...

    def close(self) -> None:
        """Stop reading ahead. Does nothing if nothing reads ahead, or at a second call."""
        ...


class Rows(Protocol):
    """Held-out sequences for one rank; every rank has the same number of them, and every pass gives the same ones."""

    def __len__(self) -> int:
        """Rows of this rank."""
        ...

    def __iter__(self) -> Iterator[tuple[Tokens, Tokens]]:
        """(tokens, labels) pairs, each int64 `[seq]`; labels that do not count are `IGNORE`."""
        ...


def merge_states(states: list[State]) -> State:
    """Merge the states of all ranks into one, from which any number of ranks can resume.

    A state is JSON. Its key `parts`, if it has one, maps names to states that only one rank has; everything
    else is the same on every rank.

    Raises:
        ValueError: the ranks are at different positions.
    """
    whole = {key: value for key, value in states[0].items() if key != "parts"}
    parts: dict[str, Any] = {}
    for state in states:
        if {key: value for key, value in state.items() if key != "parts"} != whole:
            raise ValueError(f"data states of different positions cannot be merged: {whole} and {state}")
        parts |= state.get("parts", {})
    return whole | {"parts": dict(sorted(parts.items()))} if "parts" in states[0] else whole


def check_state(state: Mapping[str, Any], **now: object) -> None:
    """Check that a saved state belongs to the stream that resumes from it.

    Args:
        state: merged results of `Stream.state`.
        now: values of the stream that resumes, under their names in the state.

    Raises:
        DamagedPosition: a value, or the number of samples, is missing or of another type.
        ConfigError: one of the values differs.
    """
    keys = {"seq_len": "training.seq_len", "seed": "seed", "streams": "data.streams"}
    for name, value in now.items():
        if type(state.get(name)) is not type(value):
            raise damaged(name, state.get(name), f"must be of the type of {value}")
    for name, value in now.items():
        if state[name] != value:
            raise ConfigError(
                keys.get(name, "data"),
                value,
                f"the checkpoint stands in the data of {name} {state[name]}",
                "resume with the data, seed and sequence length it was made with, or start a new run",
            )
    samples = state.get("samples")
    if not is_count(samples):
        raise damaged("samples", samples, "must be a whole number from 0")


def is_count(value: object) -> bool:
    """Whether a value of a state is a whole number from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def damaged(name: str, value: object, rule: str) -> DamagedPosition:
    """The error about a value that no stream saves in its state."""
    return DamagedPosition(f"data.{name}", value, rule, "resume from another checkpoint of the run")
