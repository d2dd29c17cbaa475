"""What ac=selective_op keeps of a block."""

from __future__ import annotations

from collections.abc import Sequence

from titanlab.ac.selective_op_schema import MATMULS, SelectiveOp
from titanlab.costs.account import Activation, Operation, Share, block_input


def saved_bytes(config: SelectiveOp, block: Sequence[Operation], share: Share, *, number: int) -> int:
    """Bytes that one rank keeps of block `number` between its forward and its backward.

    Its input and the results of the chosen operators, of one that nobody will need as well (the block's last product).
    """
    saved, matmuls = set(config.saved), 0
    held: list[Activation] = [block_input(block)]
    for operator in (each for operation in block for each in operation.operators):
        chosen = saved.intersection(operator.names)
        if config.every_other_matmul and chosen.intersection(MATMULS):
            matmuls += 1
            if matmuls % 2 == 0:
                continue
        if chosen:
            held += operator.results
    return share.bytes_of(held)
