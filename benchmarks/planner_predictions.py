"""Writes docs/planner-accuracy.md: how far the planner's estimates are from published runs, and predictions.

python benchmarks/planner_predictions.py          estimates, keeps benchmarks/results/planner_predictions.json and
                                                  writes the page
python benchmarks/planner_predictions.py --page   writes the page from the kept results
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from published_runs import recipe_of

from titanlab.plan import machine_of
from titanlab.plan.pipeline_time import simulated_time
from titanlab.plan.search import MARGIN
from titanlab.plan.step_time import step_time

HERE = Path(__file__).parent
FIT, RESULT = (HERE / "results" / f"planner_{name}.json" for name in ("fit", "predictions"))
PAGE = HERE.parent / "docs" / "planner-accuracy.md"
_8B = {"model": "Llama3.1-8B", "gpus": "128", "dp": "128", "local_batch": "2", "ac": "selective(op)"}
_70B = {
    "model": "Llama3.1-70B",
    "gpus": "256",
    "dp": "32",
    "tp": "8",
    "local_batch": "16",
    "ac": "full",
    "precision": "bf16+float8",
    "compile": "Y",
}
_405B = {
    "model": "Llama3.1-405B",
    "gpus": "512",
    "dp": "8",
    "tp": "8",
    "pp": "8",
    # As many microbatches as ranks of the pipeline, torchtitan's default at that time.
    "micro_batch": "4",
    "async_tp": "Y",
    "grad_accum_or_microbatches": "8",
    "ac": "full",
    "precision": "bf16+float8",
    "compile": "Y",
}
_LONG = {"model": "Llama3.1-8B", "gpus": "8", "ac": "full", "precision": "bf16+float8", "compile": "Y"}
# Title, what is published beside it, and the variants in order.
Case = tuple[str, str, Sequence[tuple[str, Mapping[str, str]]]]
CASES: Sequence[Case] = (
    (
        "Llama 3.1 8B, FSDP on 128 GPUs, 2 sequences of 8,192 each, ac=selective_op",
        "65.08 %, the abstract's gain with 1D parallelism on 128 GPUs",
        (
            ("bf16, eager", _8B),
            ("bf16, compile=block_no_loss", {**_8B, "compile": "Y"}),
            ("float8_tensorwise, compile=block_no_loss", {**_8B, "compile": "Y", "precision": "bf16+float8"}),
        ),
    ),
    (
        "Llama 3.1 70B, FSDP 32 × TP 8 on 256 GPUs, 16 sequences of 8,192 each, ac=full, float8, compiled",
        "12.59 %, the abstract's additional gain with 2D parallelism on 256 GPUs",
        (("tensor parallelism", _70B), ("AsyncTP", {**_70B, "async_tp": "Y"})),
    ),
    (
        "Llama 3.1 405B, FSDP 8 × TP 8 × PP 8 on 512 GPUs, 8 microbatches of 4, ac=full, float8, compiled, AsyncTP",
        "30 %, the abstract's additional gain with 3D parallelism on 512 GPUs",
        (
            ("1F1B", {**_405B, "schedule": "1F1B"}),
            ("interleaved 1F1B, 2 stages per rank", {**_405B, "schedule": "1F1B-I"}),
        ),
    ),
    (
        "Llama 3.1 8B on 8 GPUs, one sequence for each context-parallel group, ac=full, float8, compiled",
        "",
        tuple(
            (
                f"{32 * ranks}k tokens, CP {ranks}",
                {**_LONG, "dp": str(8 // ranks), "cp": str(ranks), "seq_len": str(32768 * ranks), "local_batch": "1"},
            )
            for ranks in (1, 2, 4, 8)
        ),
    ),
)
_USUAL = {
    "id": "0",
    "source": "202412",
    "table": "",
    "hw": "H100 96GB",
    "dp_kind": "FSDP2",
    "seq_len": "8192",
    "tp": "",
    "pp": "",
    "vp": "",
    "cp": "",
    "micro_batch": "",
    "grad_accum_or_microbatches": "",
    "precision": "bf16",
    "compile": "N",
    "async_tp": "N",
    "schedule": "",
    "notes": "",
    "mfu_pct": "",
}


# Each term of the model of time, and of memory, with what it rests on.
TERMS = (
    (
        "products",
        """the median of 24 products of a step, measured on an H200 at its limit of 700 W; the published largest rates
        of A100; for Blackwell 0.85 of the published largest rates, as on the H200. In float32 a device without a figure
        has a sixteenth of its rate in bfloat16, as an A100: an assumption""",
    ),
    (
        "limit of power",
        """dynamic power is c·V²·f, so that the clock grows with the cube root of the power beyond 100 W: an H100 of 500
        W reaches 0.87 of the rates at 700 W. The formula is of the textbook; nothing here has measured it""",
    ),
    (
        "attention",
        """by kernel and direction: measured on an H200 for Hopper, published causal rates for A100; others by their
        share of the peak""",
    ),
    (
        "memory bandwidth",
        "of the datasheet, with two fitted shares: of separate kernels, and of compiled ones (a copy on an H200: 0.89)",
    ),
    (
        "norms of published runs",
        """counted in the code of TorchTitan (3faaa1a, 4d88a8a: `norm_type = "rmsnorm"`) and of fms: seven kernels and
        36 bytes for an element outside compiled code; titanlab has torch's kernel, of 4 bytes""",
    ),
    (
        "casts to float8",
        """counted in torchao's code: six kernels and 33 bytes for an element outside compiled code, each operand twice;
        7 or 10 bytes inside it. Scales by row: torchao scales the results of both products of gradients in a kernel of
        its own (`addmm_float8_unwrapped`), 4 bytes for each in compiled code, 12 outside""",
    ),
    (
        "float8 in the other order of memory",
        """outside compiled code torch copies 2²⁸ elements of a byte in 1.98 ms (pytorch/pytorch#113560, whose GPU is
        faster than an A100 and taken to be an H100)""",
    ),
    (
        "host",
        """benchmarks/host_cost.py on a CPU: a block's operators, and what FSDP2's hooks and tensor parallelism add.
        That compiled code needs a fifth of it for a kernel is an assumption""",
    ),
    (
        "collectives",
        "bytes are declared and traced; latencies are Calculon's and NCCL's; the bandwidths are fitted",
    ),
    (
        "overlap",
        """fitted, one parameter for all collectives that run beside products; which of them can is read from FSDP2's
        and the ring's code""",
    ),
    (
        "pipelines",
        """simulated action by action from the schedule's own list; ranking uses a shorter simulation, within 1 % of the
        whole one. The published rows are Megatron's""",
    ),
    (
        "optimizer",
        """bytes of parameters, gradients and states, and the passes of the trainer's code over gradients; Muon's FLOPs
        by its formula. What Muon's ranks send each other is not counted""",
    ),
    ("stragglers", "fitted, a share of the step for each doubling of the nodes"),
    (
        "options without a price",
        """none: `titanlab plan` names them. `tests/plan/test_every_option.py` changes every option of every group, and
        each other one changes the estimate""",
    ),
    (
        "AsyncTP",
        """torch's `micro_pipeline_tp` splits a gather with the products that read it, and a sum with the product before
        it: each collective hides behind those products alone. Which are split is counted in compiled blocks
        (`tests/compile/test_async_tensor.py`): not the sums of the backward pass; in float8 only the sums of the
        forward pass, because titanlab casts what it has gathered; nothing of experts""",
    ),
    ("ring of context parallelism", "bytes and kernels counted in `titanlab/parallelism/context.py`"),
    ("totals of a step", "NCCL's trees: 2·log₂ of the nodes, and a chain in each node"),
    ("gradients of further microbatches", "bytes counted in FSDP2's code: 10 for each parameter in bfloat16"),
    ("imbalance of experts", "arXiv 2408.15664, table 2; grouped products by bytes and tiles, without a measurement"),
    (
        "activations of compiled blocks",
        "what the compiler drops, by rule: 63.8 GB estimated and 63.9 allocated on an H200",
    ),
    ("allocator", "the median of published runs, reserved over estimated"),
)


def predictions() -> list[dict[str, Any]]:
    """The estimates of all cases."""
    found = []
    for title, published, variants in CASES:
        rows = []
        for name, values in variants:
            recipe = recipe_of({**_USUAL, **values})
            estimate = step_time(recipe, machine_of(recipe), pipeline=simulated_time)
            parts = {part: round(seconds / estimate.seconds, 4) for part, seconds in estimate.parts.items()}
            rows.append({"variant": name, "tokens_per_second": round(estimate.tokens_per_second, 1), "parts": parts})
        found.append({"title": title, "published": published, "rows": rows})
    return found


def page(fit: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> str:
    """The text of docs/planner-accuracy.md."""
    parts = (_introduction(fit), _throughput(fit), _session(fit), _memory(fit), _experts(), _cases(cases))
    return "\n\n".join(itertools.chain.from_iterable(parts)) + "\n"


def _introduction(fit: Mapping[str, Any]) -> Iterable[str]:
    yield "# How far the planner is off"
    yield _filled(f"""
        This page is written by `benchmarks/planner_predictions.py` from results that `benchmarks/planner_fit.py` keeps
        in `benchmarks/results/` ({fit["date"]}, on two shared CPU cores: no GPU takes part). Tests hold it to both.
    """)
    yield _filled("""
        The model of time has eight parameters that are fitted, all physical and the same for every row; their names and
        meanings are in `titanlab/plan/machine.py`. Bandwidths, peaks and latencies are those of datasheets and of the
        literature. The runs and their sources are in `benchmarks/published/`, and so are the rows that are left out,
        each with a reason that was written before the first fit.
    """)
    values = ", ".join(f"{name} {value:g}" for name, value in fit["efficiencies"].items())
    yield _filled(f"""
        The fitted values: {values}. `launch_seconds`, `latency`, `host_seconds` and `hook_seconds` are given, not
        fitted.
    """)
    yield _filled("""
        Five readings of rows were changed when residuals had been seen, each by a source outside of these runs:
        torchao's H100, the kernel of attention, the norms of eager programs, TorchTitan's gathers in float8, and its
        AsyncTP with scales by row
        (`benchmarks/published/README.md`).
    """)
    yield "What each term rests on:"
    yield _table("| term | evidence |", [[term, " ".join(evidence.split())] for term, evidence in TERMS])


def _throughput(fit: Mapping[str, Any]) -> Iterable[str]:
    rows = fit["rows"]
    yield "## Throughput"
    yield _filled(f"""
        {fit["runs"]} runs with FSDP from {fit["tables"]} tables. Fitted to all of them, the median absolute error is
        {fit["median_error"]:.1%}; cross-validated, each table estimated by a fit without it, it is
        {fit["cross_validated_median_error"]:.1%}. Of {fit["pairs"]} pairs of variants in one table that differ by more
        than 5 %, {fit["pairs_in_order"]} are in the right order.
    """)
    wrong = ", ".join(f"{one} and {other}" for one, other in fit["wrong_pairs"])
    if wrong:
        yield _filled(f"The pairs in the wrong order are {wrong} (numbers of rows below).")
    regret = [group["regret"] for group in fit["regrets"]]
    yield _filled(f"""
        Regret: of the variants of one model in a table, the measured speed of the variant that the planner estimates as
        the fastest, over the best measured speed. Over {len(regret)} groups it is {statistics.fmean(regret):.3f} on
        average and {min(regret):.3f} at worst. These tables vary precision, compilation and checkpointing more than
        layouts.
    """)
    yield _filled("""
        The largest errors by term. Long sequences: in TorchTitan's table 2 every GPU has 32,768 tokens, and each hop of
        a balanced ring computes as much as the causal part of the first one. If all else takes 130 µs a token, rows 7,
        9 and 10 give 127 to 136 µs for the first part and 223 for each hop; row 8 would then reach 2,070 tokens/s, and
        reached 2,540. So no rate fits all four rows. A ring without balance would need twice the first part for a hop;
        torch's is balanced (pytorch/pytorch#132442). TorchTitan's ring also sends keys and values repeated to all
        heads, and merges in float32: by arithmetic about a quarter of what is missing, if nothing hides it.
        Tensor parallelism: two GPUs of KempnerForge
        are a third slower than one. A part of that is known and not yet in the fit, see the layouts of experts below.
        Row 41 is rowwise float8 with AsyncTP, which torch did not fuse at that time: it is estimated without AsyncTP.
    """)
    yield "The median error of each source, cross-validated:"
    yield _by_source(rows, {row["id"]: row for row in rows})
    head = "| row | run | measured tokens/s | error | cross-validated |"
    yield _table(
        head,
        [
            [*_cells(row), f"{row['error']:+.1%}", f"{row['cross_validated_error']:+.1%}"]
            for row in rows
            if row["fitted"]
        ],
    )
    yield _filled("""
        Rows that the fit does not use. Megatron's kernels are its own; the pipelines of the zero-bubble paper run GPT;
        the B200 are power-limited, and the MI300X have other libraries.
    """)
    head = "| row | run | measured tokens/s | error |"
    yield _table(head, [[*_cells(row), f"{row['error']:+.1%}"] for row in rows if not row["fitted"]])


def _session(fit: Mapping[str, Any]) -> Iterable[str]:
    yield "## Runs on an H200"
    yield _filled("""
        Runs of titanlab itself (`benchmarks/results/gpu_session_h200`): 8 layers of Llama 3 8B on one GPU. The fit does
        not use their speeds; the rates of products and of attention were measured in the same session.
    """)
    yield _table(
        "| run | measured tokens/s | error | error of reserved memory |",
        [
            [row["run"], f"{row['measured']:,.0f}", f"{row['error']:+.1%}", f"{row['memory_error']:+.1%}"]
            for row in fit["session"]
        ],
    )
    yield _filled("""
        The measured speed of `ladder/cuda_graphs` is that of its last two steps; the steps before them record graphs.
        Float8: the code of that session cast the weight of the head, and copied it into the other order of memory, for
        each chunk of tokens; today's code does so once. These rows are estimated with the kernels that ran:
        `_chunk_casts` in `benchmarks/planner_fit.py`. For scales by row a part of the difference is left: kernels that
        reduce along columns, and that multiply by a scale for each column, are charged the rate of other separate
        kernels, and no source has their rate.
    """)


def _by_source(rows: Sequence[Mapping[str, Any]], known: Mapping[int, Mapping[str, Any]]) -> str:
    """A table of the errors of fitted rows, by source and table; `known` says which row is of which."""
    tables: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["fitted"]:
            table = known[row["id"]]["source"], known[row["id"]]["table"]
            tables.setdefault(table, []).append(abs(row["cross_validated_error"]))
    return _table(
        "| source | table | runs | median error |",
        [
            [source, table, str(len(errors)), f"{statistics.median(errors):.1%}"]
            for (source, table), errors in tables.items()
        ],
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [str(row["id"]), row["run"], f"{row['measured']:,.0f}"]


def _memory(fit: Mapping[str, Any]) -> Iterable[str]:
    memory = fit["memory"]
    runs = {row["id"]: row["run"] for row in fit["rows"]}
    yield "## Memory"
    yield _filled(f"""
        The allocator reserves more than tensors take: {memory["allocator_excess"]:.3f} bytes for each byte of the
        estimate, the median of {memory["runs"]} runs. Cross-validated in the same way, the median absolute error is
        {memory["cross_validated_median_error"]:.1%}.
    """)
    yield _filled(f"""
        A plan leaves {100 * MARGIN:.0f} % of a device's memory free: 2 % for CUDA and NCCL, the rest for this error.
        The largest errors: the rows of KempnerForge keep whole logits and the whole embedding on every tensor-parallel
        rank; the estimate has the first and not the second, which no recipe of titanlab has. The median error of each
        source, cross-validated:
    """)
    yield _by_source(memory["rows"], {row["id"]: row for row in fit["rows"]})
    yield _table(
        "| row | run | error | cross-validated |",
        [
            [
                str(row["id"]),
                runs[row["id"]],
                f"{row['error']:+.1%}",
                f"{row['cross_validated_error']:+.1%}" if row["fitted"] else "not fitted",
            ]
            for row in memory["rows"]
        ],
    )


# Layouts of `tests/plan/test_expert_layouts.py` that are not among the first five answers: the model, GPUs, expert's
# layout, first answer, how much longer the best recipe of the expert's family takes, and its largest parts.
EXPERTS = (
    ("70B", "64", "TP 4, PP 8", "dp_s64", "13.7 %", "tensor 8 %, bubble 1 %; the answer has shard 10 %"),
    ("70B", "256", "TP 8", "dp_s256", "6.0 %", "tensor 8 %, shard 3 %; the answer has shard 6 %"),
    ("405B", "512", "TP 8, PP 8", "dp_s256·tp2", "13.3 %", "tensor 13 %, bubble 9 %; the answer 5 %, and shard 12 %"),
    (
        "405B",
        "1,024",
        "TP 8, PP 8, CP 2",
        "dp_s512·tp2",
        "15.7 %",
        "tensor 10 %, bubble 9 %; the answer has shard 13 %",
    ),
    ("405B", "8,192", "TP 8, PP 16", "dp_r16·dp_s128·tp4", "2.5 %", "near, but 23 recipes with context are before it"),
    ("235B", "256", "FSDP, TP 2, EP 8", "dp_s4·tp2·pp32", "5.3 %", "tensor 34 %: exchanges of experts inside a node"),
    ("30B", "16", "PP 2, EP 8", "dp_s16", "37.8 %", "tensor 25 %: exchanges of experts"),
    ("405B, 131k", "512", "TP 8, PP 8, CP 4", "dp_s16·cp8·tp4", "12.8 %", "tensor 12 %, bubble 4 %; the answer 5 %"),
)


def _experts() -> Iterable[str]:
    yield "## Layouts of experts"
    yield _filled("""
        Of twelve layouts that experts chose (`tests/plan/test_expert_layouts.py` has the sources), the planner's first
        five answers have the family of four. The others, on H100 with 80 GB (2026-11-28), each with the time of its
        best recipe of that family over the fastest:
    """)
    yield _table("| model | GPUs | expert | first answer | longer by | why |", [list(row) for row in EXPERTS])
    yield _filled("""
        70B: llm-foundry, with FSDP alone, bfloat16, full checkpointing and 2,048 tokens, trains 70B with 1,039
        tokens/s on 64 H100 and 1,035 on 256, 421 and 419 model TFLOP/s
        (mosaicml/llm-foundry@8c8dd48, scripts/train/benchmarking/README.md); Megatron-Core with TP 8 and PP 2 reaches
        419.7 on 768 H100 (NVIDIA/Megatron-LM@d98e8a64, images/model_table.png). So FSDP alone is about as fast. No
        table has both on as many GPUs.
    """)
    yield _filled("""
        30B: for this model on 8 B200, FSDP alone with TorchTitan reaches 19,500 tokens/s of one GPU, and EP 4 with PP 2
        17,500 (mlc-ai/pith-train#79). Megatron without FSDP has to divide the experts, or they do not fit.
    """)
    yield _filled("""
        235B: a term is wrong. The published rows with tensor parallelism gather and scatter along the second dim, for
        which torch copies the whole tensor before or after each collective (`torch.distributed`,
        `all_gather_tensor` and `reduce_scatter_tensor`); and KempnerForge scatters the gradients of the inputs of five
        layers, where the estimate has two (its tensor_parallel.py at 0c4eba1: each layer redistributes its own input).
        titanlab does neither, but the fit puts their time into `link`. With both, `link` is
        0.68 instead of 0.43, the cross-validated error 3.2 %, that of the AsyncTP table 1.8 %, 21 of 21 pairs are in
        order, and FSDP with TP 2 and experts divided is the third answer, 0.1 % behind the fastest. The fit does not
        have these readings yet.
    """)
    yield _filled("""
        405B: no run with FSDP and TP 2 on 512 or more GPUs is published, so that nothing here confirms or refutes these
        answers. They rest on FSDP's gathers reaching 0.9 of the network.
    """)


def _cases(cases: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    yield "## Predictions"
    yield _filled("""
        Estimates for the machines on which TorchTitan was measured (`cluster=h100_96gb`), beside the gains that its
        abstract states (arXiv 2410.06511). The abstract does not say every setting, so the settings here are
        titanlab's, and the gains are not those of the same runs. Each gain is over the line before. Where something is
        compiled, it is the blocks and not the loss.
    """)
    for case in cases:
        yield f"### {case['title']}"
        lines, before = [], None
        for row in case["rows"]:
            rate = row["tokens_per_second"]
            parts = ", ".join(f"{name} {share:.0%}" for name, share in row["parts"].items() if share >= 0.01)
            lines.append([row["variant"], f"{rate:,.0f}", "" if before is None else f"{rate / before - 1:+.1%}", parts])
            before = rate
        yield _table("| variant | tokens/s of one GPU | gain | where the time goes |", lines)
        if case["published"]:
            whole = case["rows"][-1]["tokens_per_second"] / case["rows"][0]["tokens_per_second"] - 1
            yield _filled(f"From first to last: {whole:+.1%}. Published: {case['published']}.")


def _filled(text: str) -> str:
    """A paragraph in lines of at most 120 characters."""
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def _table(head: str, rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    rule = "|" + " --- |" * (head.count("|") - 1)
    return "\n".join([head, rule, *(f"| {' | '.join(row)} |" for row in rows)])


def main() -> None:
    """Estimate and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="only write the page, from the kept results")
    if not parser.parse_args().page:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        RESULT.write_text(json.dumps({"date": date, "cases": predictions()}, indent=1) + "\n")
    PAGE.write_text(page(json.loads(FIT.read_text()), json.loads(RESULT.read_text())["cases"]))


if __name__ == "__main__":
    main()
