"""How fast this device computes the matrix products and the attention of some recipes, and copies memory.

    python -m gpu_session.rates RECIPES.json RESULT.json

`rates`, `attention` and `memory` of the result have the seconds of each; `failed` has those that gave an error.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpu_session.prediction import Facts, composed
from gpu_session.products import FLOAT8, Product, attention_of, products_of
from gpu_session.watch import Watch
from titanlab.techniques.model.attention import InnerAttention
from titanlab.techniques.profiler.rates import mean_seconds

# Rounds of which the median counts.
_TIMES = 5
# The backward pass of fused attention has five products, the forward pass two (arXiv 2307.08691, section 2.3).
_ATTENTION_BACKWARD = 2.5


def main() -> None:
    """Measure all products of some recipes; what is measured is on the disk at once."""
    given, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    facts = Facts(**given["facts"])
    recipes = [composed(keys, facts) for keys in given["recipes"]]
    wanted = sorted(set().union(*map(products_of, recipes)), key=lambda each: (each.format, -each.flops, each.kind))
    result: dict[str, Any] = {"rates": {}, "attention": {}, "memory": {}, "failed": {}}
    with Watch(facts.uuid) as watch:
        meter = _Meter(facts.device != "cpu", watch, given["seconds"])
        done = _guarded(result, out)
        done("copy", "memory", lambda: meter.copy(given["copied"]))
        for product in wanted:
            done(str(product), "rates", lambda product=product: meter.product(product))
        for kernel in given["kernels"]:
            done(kernel, "attention", lambda kernel=kernel: meter.attention(kernel, attention_of(recipes[0])))
        meter.seconds = given["sustained"]
        for form in dict.fromkeys(each.format for each in wanted):
            largest = next(each for each in wanted if each.format == form)
            done(f"{largest}, sustained", "rates", lambda product=largest: meter.product(product))


def _guarded(result: dict[str, Any], out: Path) -> Callable[[str, str, Callable[[], Any]], None]:
    """A function that measures one figure, keeps an error as data, and writes what there is."""

    def done(name: str, group: str, measure: Callable[[], Any]) -> None:
        try:
            result[group][name] = measure()
            print(name, json.dumps(result[group][name]))
        except Exception as error:
            result["failed"][name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            print(name, result["failed"][name])
        out.write_text(json.dumps(result))

    return done


class _Meter:
    """Times calls on one device."""

    def __init__(self, on_gpu: bool, watch: Watch, seconds: float) -> None:  # noqa: FBT001
        self._watch, self.seconds = watch, seconds
        self._device = torch.device("cuda" if on_gpu else "cpu")
        torch.manual_seed(0)

    def product(self, product: Product) -> dict[str, Any]:
        """Seconds and FLOP/s of a product, with what nvidia-smi says meanwhile."""
        call = self._call(product)
        timing = self._timed(call)
        return {**timing, "flops": product.flops, "tflops": product.flops / timing["seconds"] / 1e12}

    def _call(self, product: Product) -> Callable[[], Any]:
        tokens, columns, inner = product.tokens, product.columns, product.inner
        # Operands in the order of memory in which autograd has them: output = x·Wᵀ, inputs = g·W, weights = gᵀ·x.
        x, weight, gradient = (self._random(*shape) for shape in ((tokens, inner), (columns, inner), (tokens, columns)))
        left, right = {
            "forward": (x, weight.t()), "inputs": (gradient, weight), "weights": (gradient.t(), x)
        }[product.kind]  # fmt: skip
        if not product.format.startswith(FLOAT8):
            dtype = getattr(torch, product.format)
            left, right = left.to(dtype), right.to(dtype)
            return lambda: torch.mm(left, right)
        # The scaled product takes rows of the left operand and columns of the right one, each in one piece.
        left = left.contiguous().to(torch.float8_e4m3fn)
        right = right.t().contiguous().to(torch.float8_e4m3fn).t()
        rowwise = product.format.endswith("rowwise")
        scale_a = torch.ones(left.shape[0], 1, device=self._device) if rowwise else torch.ones((), device=self._device)
        scale_b = torch.ones(1, right.shape[1], device=self._device) if rowwise else torch.ones((), device=self._device)
        # As torchao's recipes have it.
        fast = product.kind == "forward"

        def scaled() -> Any:
            return torch._scaled_mm(
                left, right, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
            )

        return scaled

    def attention(self, kernel: str, shape: tuple[int, int, int, int, int]) -> dict[str, Any]:
        """Seconds of causal attention by one kernel, forward and backward."""
        batch, heads, kv_heads, seq, width = shape
        module = InnerAttention(kernel)
        module.prepare(self._device)
        # As a block has them: [batch, seq, heads, width], seen the other way round.
        own = [self._random(batch, seq, n, width).requires_grad_() for n in (heads, kv_heads, kv_heads)]
        qkv = [each.transpose(1, 2) for each in own]
        out = module(*qkv)
        gradient = torch.randn_like(out)
        ahead = self._timed(lambda: module(*qkv))
        back = self._timed(lambda: torch.autograd.grad(out, own, gradient, retain_graph=True))
        # Causal: half of the square.
        flops = 2 * batch * heads * seq * seq * width
        return {
            "forward": {**ahead, "tflops": flops / ahead["seconds"] / 1e12},
            "backward": {**back, "tflops": _ATTENTION_BACKWARD * flops / back["seconds"] / 1e12},
        }

    def copy(self, size: int) -> dict[str, Any]:
        """Bytes per second of a copy, counting what is read and what is written."""
        source = self._random(size // 2)
        target = torch.empty_like(source)
        timing = self._timed(lambda: target.copy_(source))
        return {**timing, "bytes_per_second": 2 * size / timing["seconds"]}

    def _random(self, *shape: int) -> Any:
        # Never zeros: they run faster than data.
        return torch.randn(*shape, device=self._device, dtype=torch.bfloat16)

    def _timed(self, call: Callable[[], Any]) -> dict[str, Any]:
        """Median seconds of a call, over some rounds of as many calls as fit; and the watch's figures."""
        once = min(mean_seconds(call, 1, self._device) for _ in range(3))
        count = max(1, round(self.seconds / _TIMES / max(once, 1e-6)))
        begin = time.time()
        rounds = [mean_seconds(call, count, self._device) for _ in range(_TIMES)]
        return {"seconds": statistics.median(rounds), **self._watch.between(begin, time.time())}


if __name__ == "__main__":
    main()
