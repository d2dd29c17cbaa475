"""Config of parallelism: the degrees, and how sharding behaves."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.errors import ConfigError
from titanlab.options import option

RESHARD = ("always", "never")


@option("parallelism")
@dataclass(kw_only=True)
class Parallelism:
    """The degrees of a layout. At most one may be -1: what the world size leaves.

    Attributes:
        replicate: copies of the model. With shard=1 this is DDP, with shard>1 HSDP.
        shard: processes over which FSDP2 shards parameters, gradients and optimizer state.
        reshard_after_forward: `always` frees a block's parameters after its forward pass and gathers
            them again for the backward; `never` keeps them: more memory, less communication.
        cpu_offload: sharded parameters, gradients and optimizer state live in host memory.
    """

    replicate: int = 1
    shard: int = 1
    reshard_after_forward: str = "always"
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        if self.reshard_after_forward not in RESHARD:
            raise ConfigError(
                "parallelism.reshard_after_forward",
                self.reshard_after_forward,
                "is no policy",
                f"try {' or '.join(RESHARD)}",
            )

    def degrees(self) -> dict[str, int]:
        """Degree by axis, as given."""
        return {"replicate": self.replicate, "shard": self.shard}
