"""The contract of a model: its config, its builder, and its form in Hugging Face transformers. Torch-free."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from titanlab.costs import OptionConfig

if TYPE_CHECKING:
    from titanlab.costs import Init, ModelAccount, Operation
    from titanlab.techniques.model.language_model import LanguageModel

# The config class of one kind of model.
Model = TypeVar("Model")


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """How another library names and stores one parameter.

    Attributes:
        name: the parameter's name in that library.
        head: width w of a head if that library orders the rows of a head differently: there, rotary pairs are rows
            (0, w/2), (1, w/2 + 1), …; in titanlab they are rows (0, 1), (2, 3), …. 0: the order is the same.
        stack: names of that library's tensors, if the parameter here is a stack of several tensors along a new first
            dim; `name` then only appears in messages. Empty: the parameter is one tensor there.
    """

    name: str
    head: int = 0
    stack: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.stack or (self.name,)

    def shape_there(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each tensor in the other library, from the parameter's shape."""
        return shape[1:] if self.stack else shape


@dataclass(frozen=True, kw_only=True)
class ReducedSizes:
    """Sizes of the small copy of a model that proofs and rehearsals train, in a second on a CPU.

    Attributes:
        heads, kv_heads: attention heads, and key/value heads; each divisible by the tensor-parallel degree.
        unit: a model makes each width that it derives from these sizes a multiple of `unit`.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    unit: int


class ModelConfig(OptionConfig, Protocol):
    """A config of the group `model`: a torch-free dataclass that inherits from this class.

    Attributes:
        vocab_size: rows of the embedding and of the output head.
        attention: the kernel that computes attention; see `titanlab.techniques.model.attention`.
        masks_documents: whether the model's forward takes `starts`; see `titanlab.techniques.model.language_model`.
    """

    vocab_size: int
    attention: str = "auto"
    masks_documents: ClassVar[bool] = False

    @abstractmethod
    def account(self) -> ModelAccount:
        """Parameters by name in the module's order, the sizes that cost estimates need, and the pipeline's pieces."""

    @abstractmethod
    def block_operations(self, *, batch: int, seq_len: int) -> list[Operation]:
        """The operations of one transformer block's forward; pipeline stages are balanced by their FLOPs."""

    @abstractmethod
    def edge_operations(self, *, batch: int, seq_len: int) -> list[Operation]:
        """The operations before and after the blocks; each has the name of its pipeline piece."""

    @abstractmethod
    def initial_values(self) -> Mapping[str, Init]:
        """The initial value of every parameter, by name."""

    @abstractmethod
    def implementation(self) -> ModelBuilder:
        """The builder of the modules. May import torch."""

    def reduced(self, sizes: ReducedSizes) -> ModelConfig | None:
        """A small copy for proofs and rehearsals; None: they train the model itself, which must be small."""
        return None

    @classmethod
    def hugging_face(cls) -> HuggingFaceFamily[Any] | None:
        """The conversion of such models from and to transformers; None: transformers has no such models."""
        return None


class ModelBuilder(Protocol):
    """Builds the modules that a config describes."""

    @abstractmethod
    def build(self, *, seq_len: int) -> LanguageModel:
        """Build the full model for sequences of up to `seq_len` tokens; works under `torch.device("meta")`."""


class HuggingFaceFamily(Protocol[Model]):
    """Converts models of one kind from and to transformers: config.json, and names of tensors.

    Attributes:
        architectures: values of `architectures` in supported config.json files.
        derived: matches names of tensors that an import skips, because config.json determines them.
    """

    architectures: Sequence[str]
    derived: re.Pattern[str]

    @abstractmethod
    def from_hf(self, config: Mapping[str, Any]) -> Model:
        """The model that a config.json describes; ConfigError: the model is not supported, or the file incomplete."""

    @abstractmethod
    def to_hf(self, model: Model, *, context: int) -> dict[str, Any]:
        """The config.json of a model whose sequences may have `context` tokens."""

    @abstractmethod
    def tensors(self, model: Model) -> dict[str, Foreign]:
        """Name of each parameter in titanlab → its name and the order of its rows in transformers."""

    def copies(self, model: Model) -> dict[str, str]:
        """Name of a tensor that a checkpoint may have in addition (a tied head) → the tensor that it must equal."""
        return {}

    def stretched_context(self, model: Model) -> int:
        """The context length in tokens for which rotary frequencies were scaled; 0 without scaling."""
        return 0

    @abstractmethod
    def difference(self, model: Model, other: Model) -> str:
        """Name of the first field by which two models compute differently with the same weights; empty: none."""
