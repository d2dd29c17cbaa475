"""A workaround for torch 2.13: the order of generator states and objects that a compiled forward saves.

A recomputation needs the generator's state of the forward pass; torch treats attention as random even without dropout.
On a CPU the forward graph returns this state. torch 2.13 returns it after objects that are not tensors, such as the
mesh of DTensor parameters, and then treats such an object as a tensor when it saves them ("expected all
tensors_saved_with_vc_check to be Tensors"), so that tensor parallelism with checkpointing fails.
No upstream issue is known. Delete this when tests/ac/test_parity.py passes without it.
"""

from __future__ import annotations

import functools
from typing import Any

_PATCHED = "titanlab_puts_states_first"


def put_states_before_objects() -> None:
    """Patch torch's partitioner to return states first, as its runtime expects. Later calls do nothing."""
    from torch._functorch import partitioners

    # torch 2.11 saves no such objects and lacks this function.
    is_object = getattr(partitioners, "is_opaque_node", None)
    original = partitioners.functionalize_rng_ops
    if is_object is None or hasattr(original, _PATCHED):
        return

    @functools.wraps(original)
    def functionalize(joint: Any, forward: Any, backward: Any, sizes: int) -> Any:
        objects = sum(map(is_object, forward.graph.output_node().all_input_nodes))
        # Outputs end with objects and then sizes; torch uses this argument only as the place to insert states.
        forward, backward = original(joint, forward, backward, sizes + objects)
        inputs = list(backward.graph.find_nodes(op="placeholder"))
        first = next((node for node in inputs if is_object(node)), None)
        if first is not None:
            for node in inputs:
                if node.name.startswith("rng_state_output"):
                    first.prepend(node)
            backward.recompile()
        return forward, backward

    setattr(functionalize, _PATCHED, True)
    partitioners.functionalize_rng_ops = functionalize  # type: ignore[assignment]
