"""Config of data=synthetic."""

from __future__ import annotations

from dataclasses import dataclass, field

from titanlab.data.contract import DataConfig, DataSource
from titanlab.errors import ConfigError
from titanlab.options import option


@option("data", "synthetic")
@dataclass(kw_only=True)
class Synthetic(DataConfig):
    """Random tokens, computed and not read: for benchmarks, in which no step may wait for data.

    Attributes:
        vocab_size: tokens are drawn uniformly from [0, vocab_size).
        gaps: labels at the beginning of sequences do not count, of every fourth sequence none, then a quarter, a half
            and three quarters: for proofs, since a mean over the labels of one rank is then not the mean over all.
        document_mask: the sequences are documents, each of which ends with token 0; attention stays within each, and
            positions restart.
        document_tokens: mean number of tokens in a document; lengths are drawn, as geometric distributions have them.
    """

    kind: str = "synthetic"
    vocab_size: int = 2048
    gaps: bool = field(default=False, metadata={"before": False})
    document_mask: bool = field(default=False, metadata={"before": False})
    document_tokens: int = field(default=256, metadata={"before": 256})

    def __post_init__(self) -> None:
        if not 2 <= self.vocab_size <= 2**31:
            raise ConfigError("data.vocab_size", self.vocab_size, "must be between 2 and 2147483648", "try 2048")
        if self.document_tokens < 1:
            raise ConfigError("data.document_tokens", self.document_tokens, "must be at least 1", "try 256")

    def implementation(self) -> DataSource:
        from titanlab.data.synthetic import SyntheticSource

        return SyntheticSource(self)
