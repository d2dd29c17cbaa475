"""Where the states of random generators stand among what a compiled forward hands to its backward.

What is computed again in the backward of a compiled block has to meet the generator as it was, and attention counts as
random without dropout too. On a CPU torch returns the state from the forward graph. torch 2.13 puts it behind objects
that are no tensors, such as the mesh of DTensor parameters, and takes one of those for a tensor when it saves them
("expected all tensors_saved_with_vc_check to be Tensors"): tensor parallelism and checkpointing together do not run.
Not known to be reported; to be deleted when tests/ac/test_parity.py passes without.
"""

from __future__ import annotations

import functools
from typing import Any

_MENDED = "titanlab_puts_states_first"


def put_states_before_objects() -> None:
    """Let torch's partitioner order them as its runtime reads them, from now on; once is enough."""
    from torch._functorch import partitioners

    # torch 2.11 saves no such objects.
    is_object = getattr(partitioners, "is_opaque_node", None)
    original = partitioners.functionalize_rng_ops
    if is_object is None or hasattr(original, _MENDED):
        return

    @functools.wraps(original)
    def functionalize(joint: Any, forward: Any, backward: Any, sizes: int) -> Any:
        objects = sum(map(is_object, forward.graph.output_node().all_input_nodes))
        # Of the outputs, sizes come last and objects before them; the argument only says where states end.
        forward, backward = original(joint, forward, backward, sizes + objects)
        inputs = list(backward.graph.find_nodes(op="placeholder"))
        first = next((node for node in inputs if is_object(node)), None)
        if first is not None:
            for node in inputs:
                if node.name.startswith("rng_state_output"):
                    first.prepend(node)
            backward.recompile()
        return forward, backward

    setattr(functionalize, _MENDED, True)
    partitioners.functionalize_rng_ops = functionalize  # type: ignore[assignment]
