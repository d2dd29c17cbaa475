"""What titanlab asks of a model: its config, what builds it, and its form in Hugging Face transformers. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import Field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from titanlab.costs.account import Init, ModelAccount, Operation
    from titanlab.costs.setting import Setting
    from titanlab.model.language_model import LanguageModel
    from titanlab.system.foreign import Foreign


class ModelConfig(Protocol):
    """A config of the group `model`: a dataclass that inherits from this class, and that never imports torch.

    Attributes:
        kind: name of the option.
        vocab_size: rows of the embedding and of the head.
        attention: the kernel that computes attention; see `titanlab.model.attention`.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    kind: str
    vocab_size: int
    attention: str = "auto"

    def account(self) -> ModelAccount:
        """Parameters by name in the module's own order, the sizes that sums need, and where the model may be cut."""
        ...

    def block_operations(self, *, batch: int, seq_len: int) -> list[Operation]:
        """What one block computes in its forward pass; pipeline stages are balanced by its FLOPs."""
        ...

    def edge_operations(self, *, batch: int, seq_len: int) -> list[Operation]:
        """The same before and after the blocks; each operation has the name of its piece."""
        ...

    def initial_values(self) -> Mapping[str, Init]:
        """How every parameter starts, by name."""
        ...

    def implementation(self) -> ModelBuilder:
        """What builds the modules. May import torch."""
        ...

    def check(self, setting: Setting) -> None:
        """Check rules that reach beyond the model's own fields; by default there are none.

        Raises:
            ConfigError: the first rule that is broken.
        """
        return

    @classmethod
    def hugging_face(cls) -> HuggingFaceFamily | None:
        """How models of this kind are kept by transformers; None: they have no form there."""
        return None


class ModelBuilder(Protocol):
    """Builds the modules that a config describes."""

    def build(self, *, seq_len: int) -> LanguageModel:
        """The whole model for sequences of up to `seq_len` tokens; works under `torch.device("meta")`."""
        ...


class HuggingFaceFamily(Protocol):
    """Models of one kind in the form of transformers: config.json and names of tensors, both ways.

    Attributes:
        architectures: values of `architectures` in the config.json files that it reads.
        derived: matches names of tensors that follow from config.json and need not be read.
    """

    architectures: Sequence[str]
    derived: re.Pattern[str]

    def from_hf(self, config: Mapping[str, Any]) -> ModelConfig:
        """The model that a config.json describes.

        Raises:
            ConfigError: it describes a model that is not computed here, or an incomplete one.
        """
        ...

    def to_hf(self, model: Any, *, context: int) -> dict[str, Any]:
        """config.json of a model whose sequences may have `context` tokens."""
        ...

    def tensors(self, model: Any) -> dict[str, Foreign]:
        """Where transformers keeps each of our parameters, by our name."""
        ...

    def copies(self, model: Any) -> dict[str, str]:
        """Tensors that a folder may have and that must equal another one, such as a tied head that was saved too."""
        return {}

    def stretched_context(self, model: Any) -> int:
        """Tokens for which rotary frequencies were scaled; 0 where they were not."""
        return 0

    def difference(self, model: Any, other: Any) -> str:
        """The first field by which two models compute differently from the same weights; empty: there is none."""
        ...
