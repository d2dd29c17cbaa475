"""Which attention kernel to try first, by the device's compute capability."""

from __future__ import annotations

# torch has a fixed order, with flash first in most builds. Devices on which that is not the fastest:
# - Hopper (9): cuDNN is 1.7 to 2.3 times as fast, forward and backward, bf16 (huggingface/transformers#48163;
#   pytorch/pytorch#142132 has 631 against 329 TFLOP/s); a training step gains 10 % (pytorch/torchtitan#1042).
# - Data-centre Blackwell (10): 12 % more tokens per second with cuDNN (pytorch/torchtitan#1196).
# Ampere and workstation Blackwell (12) are slower with cuDNN, Ada is as fast (huggingface/transformers#48163).
_CUDNN_FIRST = (9, 10)
_FUSED = ("flash", "cudnn", "efficient")


def order(name: str, capability: tuple[int, int] | None) -> tuple[str, ...]:
    """Names of fused kernels in the order in which to try them.

    Args:
        name: `auto`, or the requested kernel: `flash`, `cudnn`, `efficient`.
        capability: of the device; None: unknown.
    """
    first = name if name in _FUSED else "cudnn" if capability and capability[0] in _CUDNN_FIRST else "flash"
    return (first, *(other for other in _FUSED if other != first))
