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

# The config of the models of one kind.
Model = TypeVar("Model")


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """One parameter in another library.

    Attributes:
        name: the parameter's name in that library.
        head: width w of a head if the order of its rows differs: rotary pairs are (0, w/2), (1, w/2 + 1), … there
            and (0, 1), (2, 3), … here; 0: the same order.
        stack: names of the tensors there that are stacked along a new first dim to the parameter here; `name` then only
            appears in messages. Empty: one tensor.
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
    """Sizes with which a model trains in a second on a CPU, for proofs and rehearsals.

    Attributes:
        heads, kv_heads: attention heads, and key/value heads; each divisible by the tensor-parallel degree.
        unit: widths that are derived from these are multiples of it.
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
        """The operations of one block's forward pass; pipeline stages are balanced by their FLOPs."""

    @abstractmethod
    def edge_operations(self, *, batch: int, seq_len: int) -> list[Operation]:
        """The operations before and after the blocks; each operation has the name of its piece."""

    @abstractmethod
    def initial_values(self) -> Mapping[str, Init]:
        """The initial value of every parameter, by name."""

    @abstractmethod
    def implementation(self) -> ModelBuilder:
        """The builder of the modules. May import torch."""

    def reduced(self, sizes: ReducedSizes) -> ModelConfig | None:
        """The same model in other sizes, for proofs and rehearsals; None: only a small model can be proved."""
        return None

    @classmethod
    def hugging_face(cls) -> HuggingFaceFamily[Any] | None:
        """The form of such models in transformers; None: transformers has no such models."""
        return None


class ModelBuilder(Protocol):
    """Builds the modules that a config describes."""

    @abstractmethod
    def build(self, *, seq_len: int) -> LanguageModel:
        """Build the full model for sequences of up to `seq_len` tokens; works under `torch.device("meta")`."""


class HuggingFaceFamily(Protocol[Model]):
    """Models of one kind in the form of transformers: config.json and names of tensors, both ways.

    Attributes:
        architectures: values of `architectures` in supported config.json files.
        derived: matches names of tensors that can be computed from config.json and are not read.
    """

    architectures: Sequence[str]
    derived: re.Pattern[str]

    @abstractmethod
    def from_hf(self, config: Mapping[str, Any]) -> Model:
        """The model that a config.json describes; ConfigError: it is not supported, or its description incomplete."""

    @abstractmethod
    def to_hf(self, model: Model, *, context: int) -> dict[str, Any]:
        """config.json of a model whose sequences may have `context` tokens."""

    @abstractmethod
    def tensors(self, model: Model) -> dict[str, Foreign]:
        """Name and order of rows in transformers of each parameter, by titanlab's name."""

    def copies(self, model: Model) -> dict[str, str]:
        """Tensors that a folder may have in addition and that must equal another tensor, such as a tied head."""
        return {}

    def stretched_context(self, model: Model) -> int:
        """The context length in tokens for which rotary frequencies were scaled; 0 without scaling."""
        return 0

    @abstractmethod
    def difference(self, model: Model, other: Model) -> str:
        """The first field that makes two models compute differently with the same weights; empty: there is none."""
