"""The contract of a kind of data: its config, its reader, the streams that the reader opens. Free of torch.

A stream has a position that can be saved, and any number of ranks can resume from this position.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Protocol

from titanlab.errors import ConfigError, DamagedPosition
from titanlab.ranges import MOST_64_BITS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from titanlab.costs import Setting
    from titanlab.data.tokenizers import Tokenizer

    Tokens = npt.NDArray[np.int64]

DOCUMENT_MASK = "data.document_mask"
IGNORE = -100
"""A label that does not count in the loss; the `ignore_index` of torch's cross entropy."""

State = dict[str, Any]
Report = Callable[[str], None]


class DataConfig(Protocol):
    """A config of the group `data`: a dataclass that inherits from this class.

    Attributes:
        kind: name of the option.
        document_mask: attention stays within each document, and positions restart there; the source has `separators`.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    kind: str
    document_mask: bool = False

    @abstractmethod
    def implementation(self) -> DataSource:
        """The reader of the data. Its module must not import torch, and must not import numpy at the top."""

    def check(self, setting: Setting) -> None:
        """Check rules that need more of the recipe than `DataSource.check` receives; by default no such rules exist.

        Raises:
            ConfigError: about the first rule that is broken.
        """
        return


class DataSource(Protocol):
    """One kind of data, bound to its config. Called through the functions of `titanlab.data.source`."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A short hash of the data's content and order, part of a run's identity; the same before and after `prepare`.

        Raises:
            ConfigError: files that the config names are missing or cannot be read.
        """

    def check(self, *, seq_len: int, global_batch: int, ranks: int, vocab_size: int, validation_sequences: int) -> None:
        """Check the rules that can be checked now; called again after `prepare`, for the others. By default: no rules.

        Args:
            seq_len: tokens in a sequence.
            global_batch: sequences in a step, over all ranks; a multiple of `ranks`.
            ranks: data-parallel ranks.
            vocab_size: the size of the model's vocabulary.
            validation_sequences: number of sequences of one validation; 0: the run does not validate.

        Raises:
            ConfigError: a rule is broken, or files that the config names are missing or cannot be read.
        """
        return

    @abstractmethod
    def prepare(self, *, report: Report) -> None:
        """Do what is needed once: train a tokenizer, tokenise into the cache. Returns at once if this work is done.

        Several processes may call this at the same time: one works, the others wait.

        Raises:
            ConfigError: the data, the tokenizer or the cache cannot be used.
        """

    @abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of prepared data; None if the tokens do not come from text.

        Raises:
            ConfigError: the tokenizer cannot be read, or the data has not been prepared.
        """

    @property
    def has_documents(self) -> bool:
        """Whether `separators` may be called; known also before `prepare`. By default: whether the class defines it."""
        return type(self).separators is not DataSource.separators

    def separators(self) -> Separators | None:
        """The tokens that separate the documents of prepared data; None: this kind of data has no documents.

        Raises:
            ConfigError: the data has not been prepared.
        """
        return None

    @abstractmethod
    def open_train(
        self, *, seed: int, seq_len: int, global_batch: int, rank: int, ranks: int, state: State | None
    ) -> Stream:
        """One rank's part of the endless stream of training sequences.

        The global order depends only on data, seed, sequence length and sample number. Sample g belongs to rank
        g % ranks, so the order is the same for any number of ranks.

        Args:
            state: the position to resume from: the merged states of all ranks, whose number may differ from `ranks`.

        Raises:
            ConfigError: the data has not been prepared, is too short, or `state` is of other data.
        """

    @abstractmethod
    def open_validation(self, *, seq_len: int, sequences: int, rank: int, ranks: int) -> Rows:
        """One rank's part of the held-out sequences: the same sequences at every call and in every pass.

        Every rank has the same number of rows (sequences). All ranks together have `sequences` rows, or all that exist
        if there are fewer. Padding, within a row or as a whole row, has the label `IGNORE`.

        Raises:
            ConfigError: the data has not been prepared, or nothing was held out.
        """


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
        """Stop reading ahead. Does nothing if the stream does not read ahead, or is closed already."""
        ...


class SampleStream:
    """A base class of streams: it counts the samples that all ranks together have taken.

    Args:
        identity: the values on which the order of the samples depends; they are part of the state.
        global_batch: number of sequences of one step, over all ranks; a multiple of `ranks`.
        state: a merged state to resume from; it may come from any number of ranks and any global batch.
    """

    def __init__(
        self, *, identity: Mapping[str, Any], global_batch: int, rank: int, ranks: int, state: State | None
    ) -> None:
        self._identity = dict(identity)
        self._samples = 0
        if state is not None:
            check_state(state, **identity)
            self._samples = int(state["samples"])
        self._global_batch, self._rank, self._ranks = global_batch, rank, ranks

    def state(self) -> State:
        """See `Stream`. This part of the state is the same on every rank."""
        return {**self._identity, "samples": self._samples}

    def close(self) -> None:
        """Do nothing: this class does not read ahead."""


class Rows(Protocol):
    """Held-out sequences for one rank; all ranks have equally many, and all passes give the same sequences."""

    def __len__(self) -> int:
        """The number of this rank's rows."""
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
        now: values of the stream that resumes, under their names in the state.

    Raises:
        DamagedPosition: the state lacks a value or the number of samples, or has it with the wrong type.
        ConfigError: a value in the state differs from the value in `now`.
    """
    keys = {"seq_len": "training.seq_len", "seed": "seed", "streams": "data.streams"}
    for name, value in now.items():
        # A seed may have 63 bits, more than `as_saved` allows by default.
        as_saved(name, state.get(name), type(value), most=MOST_64_BITS)
    as_saved("samples", state.get("samples"), int)
    for name, value in now.items():
        if state[name] != value:
            rule = f"the checkpoint was made with data of {name} {state[name]}"
            cure = "resume with the data, seed and sequence length it was made with, or start a new run"
            raise ConfigError(keys.get(name, "data"), value, rule, cure)


def as_saved(name: str, value: Any, kind: Any, *, most: int = 2**62 - 1) -> Any:
    """Check that a value of a saved state has the type `kind`, and return it; an int must lie between 0 and `most`.

    Raises:
        DamagedPosition: no stream saves such a value.
    """
    # Imported here: the checks of a recipe do not need it.
    import msgspec

    try:
        return msgspec.convert(value, Annotated[int, msgspec.Meta(ge=0, le=most)] if kind is int else kind)
    except msgspec.ValidationError as error:
        raise damaged(name, value, f"must be what a stream saves ({error})") from error


def damaged(name: str, value: object, rule: str) -> DamagedPosition:
    return DamagedPosition(f"data.{name}", value, rule, "resume from another checkpoint of the run")


@dataclass(frozen=True, kw_only=True)
class Separators:
    """The tokens around each document.

    Attributes:
        begin: the first token of every document; None: documents have no such token.
        end: the last token of every document; None: documents have no such token.
    """

    begin: int | None = None
    end: int | None = None

    @property
    def separate(self) -> bool:
        """Whether there is a token that shows where documents begin."""
        return self.begin is not None or self.end is not None

    def around(self, ids: list[int]) -> list[int]:
        """The tokens of a whole document: `ids`, the tokens of its text, between `begin` and `end`."""
        begin, end = ([] if token is None else [token] for token in (self.begin, self.end))
        return [*begin, *ids, *end]

    def starts(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """For each token, the place in the sequence where its document begins: `[batch, seq]` → int64 `[batch, seq]`.

        A document from an earlier sequence begins at 0. If the same token begins and ends documents, two such
        tokens side by side separate two documents.
        """
        import numpy as np

        first = np.zeros(tokens.shape, dtype=bool)
        begins, ends = (np.zeros_like(first) if token is None else tokens == token for token in (self.begin, self.end))
        if self.begin == self.end:
            first[:, 1:] = begins[:, 1:] & ends[:, :-1]
        else:
            first[:, 1:] = begins[:, 1:] | ends[:, :-1]
        places = np.arange(tokens.shape[1], dtype=np.int64)
        return np.maximum.accumulate(np.where(first, places, 0), axis=1)


def check_separators(separators: Separators, *, whose: str, cure: str) -> None:
    """Check that documents can be told apart.

    Args:
        whose: for the error, the source of the tokens, such as `the tokenizer`.
    """
    if not separators.separate:
        rule = f"{whose} has neither a token that begins a document nor one that ends it"
        raise ConfigError(DOCUMENT_MASK, True, rule, cure)
