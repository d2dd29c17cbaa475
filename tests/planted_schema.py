"""Config of the tests' own data: synthetic tokens with gaps in the labels and faults at a step of a rank."""

import os
from dataclasses import dataclass, field

from tests.launch import holds
from titanlab.data import DataConfig
from titanlab.options import option

if os.environ.get("HOLD") in holds.EARLY:
    holds.install(os.environ["HOLD"])


@option("data", "planted")
@dataclass(frozen=True, kw_only=True)
class Planted(DataConfig):
    kind: str = "planted"
    vocab_size: int = 256
    # Labels that do not count, unevenly: of sample g a share of (g % 4) / 3.
    gaps: bool = False
    # What happens when a rank asks for the batch of a step: raise, kill, exit, hang, loop, memory, fill,
    # SIGINT, SIGTERM or SIGSTOP; and of collectives skip, shape, skip_recv, order.
    # At step 0 it raises before it joins its peers.
    fault: str = field(default="", metadata={"identity": False})
    step: int = field(default=0, metadata={"identity": False})
    rank: int = field(default=0, metadata={"identity": False})
    # forward or backward: it happens there instead, in that step's second pass through a block. With these and with
    # `data`, `rank` is that of the process, not that among those that read different data.
    where: str = field(default="", metadata={"identity": False})
    # Of `exit`.
    code: int = field(default=7, metadata={"identity": False})
    # Only in this attempt; 0: in each.
    attempt: int = field(default=0, metadata={"identity": False})
    # That every batch takes.
    seconds: float = field(default=0.0, metadata={"identity": False})
    # By which the launcher of rank 0 is later than those of other ranks.
    late: float = field(default=0.0, metadata={"identity": False})

    def implementation(self):
        from tests.planted import PlantedSource

        return PlantedSource(self)
