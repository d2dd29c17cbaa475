"""The rows of a session, in the order of what they are worth."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_session.prediction import Facts
from gpu_session.sizes import Sizes

WARM_UP = 3  # steps that compile, choose kernels and make optimizer states
POLICIES = ("none", "full", "selective_layer", "selective_op", "memory_budget")
HEAD = "precision.skip=[]"
CUDA, HOPPER = "cuda", "hopper"
# Kernels of attention that packages have, by the package's module.
PACKAGES = {"flash_attn": "flash_attn", "flash3": "flash_attn_interface"}
_OFF = ("compile=off",)


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        name: `ladder/compiled`; the part before the slash is its piece.
        kind: which function measures it: `products`, `run`, `held`, `saves`, `tests`.
        keys: of its recipe.
        expected: seconds that it takes on an H100 or H200, its start included: a fifth more than on an H200
            (2026-11-26), or an estimate if it was not measured there.
        limit: seconds after which it is ended.
        needs: what a machine must have: `cuda`, `hopper`, or a package.
        what: what it adds to the row before.
        uses: packages without which it measures less.
    """

    name: str
    kind: str
    keys: tuple[str, ...]
    expected: int
    limit: int
    needs: tuple[str, ...] = ()
    what: str = ""
    uses: tuple[str, ...] = ()

    @property
    def piece(self) -> str:
        """The group of rows that it belongs to."""
        return self.name.partition("/")[0]

    def lacking(self, facts: Facts) -> str | None:
        """Why this machine cannot measure the row; None: it can."""
        if facts.device == "cpu" and set(self.needs) & {CUDA, HOPPER}:
            return "not on a CPU"
        if HOPPER in self.needs and (facts.capability or (0, 0))[0] != 9:
            return "only on Hopper (compute capability 9.0)"
        return self.without(facts.packages)

    def without(self, installed: Mapping[str, str | None]) -> str | None:
        """Which package is missing, of those that the row needs; None: none is."""
        missing = (need for need in self.needs if need not in (CUDA, HOPPER) and installed.get(need) is None)
        return next((f"{name} is not installed" for name in missing), None)


def rows(sizes: Sizes) -> list[Row]:
    """All rows; a session does those first that say most."""
    return [
        _products(),
        *_ladder(sizes),
        *_float8(sizes, "tensorwise", "rowwise"),
        *_sixteen(sizes),
        Row("tests/gpu", "tests", (), 90, 240, ("pytest", "hypothesis", "xdist"), sizes.tests),
        *_memory(sizes),
        *_saves(sizes),
        *_kernels(sizes),
        *_float8(sizes, "rowwise_with_gw_hp"),
    ]


def _products() -> Row:
    what = "matrix products by shape and format, attention, a copy"
    return Row("products/all", "products", (), 50, 200, what=what, uses=("torchao", *PACKAGES.values()))


def chosen(all_rows: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    """The rows whose name or piece fits one of the patterns; all of them without patterns.

    Raises:
        ValueError: a pattern fits no row.
    """
    for pattern in patterns:
        if not any(_fits(row, pattern) for row in all_rows):
            pieces = ", ".join(dict.fromkeys(row.piece for row in all_rows))
            raise ValueError(f"--only {pattern}: fits no row; pieces are {pieces}, and --list shows the rows")
    return [row for row in all_rows if not patterns or any(_fits(row, pattern) for pattern in patterns)]


def _fits(row: Row, pattern: str) -> bool:
    return row.piece == pattern or fnmatch.fnmatchcase(row.name, pattern)


def _recipe(
    sizes: Sizes,
    *keys: str,
    sequences: int = 4,
    steps: int | None = None,
    fused: bool = True,
    compiled: tuple[str, ...] | None = None,
) -> tuple[str, ...]:
    """A run of some steps, of which the first ones do not count; `compiled`: keys of compilation, if not the usual."""
    return (
        *sizes.common(),
        f"training.global_batch={sequences}",
        f"training.steps={WARM_UP + (steps or sizes.steps)}",
        f"training.unmeasured_steps={WARM_UP}",
        f"model.fused={str(fused).lower()}",
        "checkpoint=off",
        *(sizes.compiled if compiled is None else compiled),
        *keys,
    )


def _ladder(sizes: Sizes) -> Iterator[Row]:
    """From eager to CUDA graphs in bf16, each step on top of the one before."""
    whole, chunks, bf16 = "training.loss_chunk=0", f"training.loss_chunk={sizes.chunk}", "precision=bf16"

    def row(name: str, what: str, *keys: str, expected: int = 30, needs: tuple[str, ...] = (), **how: Any) -> Row:
        return Row(f"ladder/{name}", "run", _recipe(sizes, *keys, **how), expected, 150, needs, what)

    yield row("eager", "nothing compiled, logits whole", bf16, whole, fused=False, compiled=_OFF, expected=22)
    yield row("compiled", "blocks and loss compiled", bf16, whole, fused=False)
    yield row("fused", "one product for q, k, v, and one for gate and up", bf16, whole)
    yield row("chunked", "head and loss in chunks of tokens; the kernel of attention is auto", bf16, chunks)
    flash = (bf16, chunks, "model.attention=flash")
    yield row("flash", "chunked, with torch's flash attention", *flash, needs=("cuda",))
    package = (bf16, chunks, "model.attention=flash_attn")
    yield row("flash_attn", "chunked, with the package flash-attn", *package, needs=("cuda", "flash_attn"))
    third = (bf16, chunks, "model.attention=flash3")
    needs = (HOPPER, PACKAGES["flash3"])
    yield row("flash3", "chunked, with the package of FlashAttention 3", *third, needs=needs)
    full = ("precision=bf16_full", chunks)
    yield row("bf16_full", "chunked, parameters stored in bf16", *full)
    graphs = (*full, "compile.mode=reduce-overhead")
    yield row("cuda_graphs", "bf16_full with CUDA graphs, which need it", *graphs, needs=("cuda",), expected=40)


def _float8(sizes: Sizes, *recipes: str) -> Iterator[Row]:
    """Recipes of float8, with the head in bf16 and in float8."""
    for recipe in recipes:
        for name, what, keys in (("", "head in bf16", ()), ("_head", "head in float8", (HEAD,))):
            chunks = f"training.loss_chunk={sizes.chunk}"
            given = _recipe(sizes, f"precision=float8_{recipe}", chunks, *keys)
            yield Row(f"float8/{recipe}{name}", "run", given, 45, 150, ("torchao",), f"chunked, {what}")


def _sixteen(sizes: Sizes) -> Iterator[Row]:
    """16 sequences a step, in which the optimizer weighs less."""
    chunks = f"training.loss_chunk={sizes.chunk}"
    for name, keys, needs in (
        ("bf16", ("precision=bf16",), ()),
        ("tensorwise_head", ("precision=float8_tensorwise", HEAD), ("torchao",)),
        ("rowwise_head", ("precision=float8_rowwise", HEAD), ("torchao",)),
    ):
        given = _recipe(sizes, chunks, *keys, sequences=16, steps=min(5, sizes.steps))
        yield Row(f"sixteen/{name}", "run", given, 60, 180, needs, "16 sequences a step")


def _memory(sizes: Sizes) -> Iterator[Row]:
    """What each policy of checkpointing keeps; parameters are stored in bf16, so that no cast of them is beside it."""
    for name in POLICIES:
        # Only a compiler knows a budget; the others are measured without one, which would keep less than they declare.
        budget = name == "memory_budget"
        compiled = sizes.budgeted if budget else _OFF
        keys = ("precision=bf16_full", f"ac={name}")
        given = _recipe(sizes, *keys, sequences=2, fused=False, compiled=compiled)
        yield Row(f"memory/{name}", "held", given, 30 if budget else 22, 120, (), f"ac={name}")


def _saves(sizes: Sizes) -> Iterator[Row]:
    """How long the training stands still for a checkpoint."""
    layers, vocabulary = sizes.saved
    for name in ("off", "sync", "async", "async_pinned"):
        given = (
            *sizes.common(layers=layers, vocabulary=vocabulary),
            "training.global_batch=4",
            f"training.steps={3 * sizes.interval - 1}",
            f"training.unmeasured_steps={WARM_UP}",
            "precision=bf16",
            *_OFF,
            f"checkpoint={name}",
            *(() if name == "off" else (f"checkpoint.every={sizes.interval}", "checkpoint.at_end=false")),
        )
        needs = ("cuda",) if name == "async_pinned" else ()
        yield Row(f"saves/{name}", "saves", given, 20 if name == "off" else 25, 150, needs, f"checkpoint={name}")


def _kernels(sizes: Sizes) -> Iterator[Row]:
    """Which kernels a step is made of."""
    chunks = f"training.loss_chunk={sizes.chunk}"
    for name, keys, needs in (
        ("bf16", ("precision=bf16",), ()),
        ("tensorwise_head", ("precision=float8_tensorwise", HEAD), ("torchao",)),
    ):
        given = _recipe(sizes, chunks, *keys)
        yield Row(f"kernels/{name}", "held", given, 38, 120, needs, "kernels of a step by time")
