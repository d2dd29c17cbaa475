"""One GPU, the shapes of Llama 3 8B: eager bf16, compiled, float8 with one scale a tensor, and one a row.

The first table of a 1D study, cut down to one device: as many of the 32 layers as fit, sequences of 8,192 tokens, the
recipe's own steps (`titanlab.training.assemble`: gradients, clipping, optimizer) on random tokens. FLOPs are
6·(N − N_emb) + 12·L·H·Q·T of the layers that run; the MFU divides by the dense bf16 peak, also for float8, which can
pass it. A step has several sequences, one after another, so that the optimizer, which no other device shares here,
does not weigh more than it would elsewhere.

    python benchmarks/gpu_recipes.py                          on a GPU: eight minutes at most
    python benchmarks/gpu_recipes.py --device cpu --tiny      what runs where there is none
    python benchmarks/gpu_recipes.py --profile compiled       which kernels a step is made of

It needs torch, torchao, hydra-core and omegaconf, and no other package. Each variant is a process of its own, which is
ended when its time is over: what it has measured by then counts, and the result says so.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
VARIANTS = {
    "eager": ["precision=bf16", "compile=off"],
    "compiled": ["precision=bf16", "compile=block"],
    "float8_tensorwise": ["precision=float8_tensorwise", "compile=block"],
    "float8_rowwise": ["precision=float8_rowwise", "compile=block"],
}
REFERENCE = "compiled"
WARM_UP = 2  # steps that compile, choose kernels and make optimizer states
PROBED = (1, 2)  # layers with which the memory of one more is measured
MOST_LAYERS = 32
USABLE = 0.92  # of the memory: the rest is for what a longer run fragments


def recipe_keys(args: argparse.Namespace, variant: str, layers: int) -> list[str]:
    """What a person would type after `titanlab train` for this variant."""
    return [
        f"model={'debug' if args.tiny else 'llama3_8b'}",
        f"model.layers={layers}",
        *VARIANTS[variant],
        f"training.seq_len={args.seq}",
        f"training.global_batch={args.sequences}",
        "training.microbatch=1",
        "training.steps=1000",
        # Alone, FSDP2 has nobody to gather from: parameters stay as they were cast.
        "parallelism.reshard_after_forward=never",
        "data=synthetic",
        "checkpoint.every=0",
        *args.key,
        f"cluster.accelerator={args.device}",
    ]


def main() -> None:
    """Measure, print and write; or be one of the processes that measure."""
    args = arguments()
    if args.child:
        child(args)
    elif args.profile:
        layers = args.layers or PROBED[-1]
        train(args, args.profile, layers, steps=WARM_UP, report=lambda *_, **__: None, profiled=True)
    else:
        study(args)


def arguments() -> argparse.Namespace:
    """From the command line; sizes that depend on others filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the debug model, sequences of 64 tokens, 3 steps")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="some of the four, separated by commas")
    parser.add_argument("--layers", type=int, help="instead of as many as fit")
    parser.add_argument("--seq", type=int, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=4, help="of a step")
    parser.add_argument("--steps", type=int, help="measured steps of a variant")
    parser.add_argument("--minutes", type=float, default=7.75, help="for all of it")
    parser.add_argument("--key", action="append", default=[], help="one more KEY=VALUE of every recipe")
    parser.add_argument("--out", type=Path, help="the result; on a GPU a file in benchmarks/results is the default")
    parser.add_argument("--profile", choices=VARIANTS, help="print the kernels of one step of a variant")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.seq = args.seq or (64 if args.tiny else 8192)
    args.steps = args.steps or (3 if args.tiny else 10)
    if args.tiny and args.layers is None:
        args.layers = 2
    unknown = set(args.variants.split(",")) - set(VARIANTS)
    if unknown:
        parser.error(f"--variants: there is no {', '.join(sorted(unknown))}")
    return args


def study(args: argparse.Namespace) -> None:
    """All variants, one after another."""
    end = time.monotonic() + 60 * args.minutes
    layers = args.layers
    result: dict[str, Any] = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "seq_len": args.seq}
    if layers is None:
        found = measure(args, "probe", 0, limit=min(120.0, end - time.monotonic()))
        if not found["peaks"]:
            sys.exit(f"nothing could be measured: {found['stopped']}")
        layers = layers_that_fit(found["peaks"], found["memory_bytes"])
        result["probe"] = {"layers": PROBED, "peak_bytes": found["peaks"]}
    variants = args.variants.split(",")
    rows: dict[str, Any] = {}
    for number, name in enumerate(variants):
        left = end - time.monotonic()
        # What earlier variants have not used is there for the later ones.
        rows[name] = (
            measure(args, name, layers, limit=left / (len(variants) - number)) if left > 5 else {"stopped": "time"}
        )
        print(line(name, rows[name]), flush=True)
    facts = next((row["facts"] for row in rows.values() if row.get("facts")), {})
    for row in rows.values():
        row.pop("facts", None)
    result.update(facts, layers=layers, sequences_per_step=args.sequences, variants=rows, ratios=ratios(rows))
    result["command"] = " ".join(["python", "benchmarks/gpu_recipes.py", *sys.argv[1:]])
    table(result)
    out = args.out
    if out is None and args.device == "cuda":
        slug = "-".join("".join(c if c.isalnum() else " " for c in str(result.get("device", "gpu")).lower()).split())
        out = ROOT / "benchmarks" / "results" / f"gpu_recipes_{slug}.json"
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n")
        print(f"written: {out}")


def layers_that_fit(peaks: list[int], memory: int) -> int:
    """As many as the memory holds, by the bytes that one more layer took."""
    if len(peaks) < len(PROBED):
        return PROBED[0]
    each = (peaks[1] - peaks[0]) / (PROBED[1] - PROBED[0])
    room = USABLE * memory - peaks[0]
    return max(PROBED[0], min(MOST_LAYERS, PROBED[0] + int(room / each)))


def measure(args: argparse.Namespace, name: str, layers: int, *, limit: float) -> dict[str, Any]:
    """A variant in a process of its own, ended after `limit` seconds."""
    passed = ["--device", args.device, "--seq", args.seq, "--sequences", args.sequences, "--steps", args.steps]
    passed += ["--layers", layers or PROBED[0], *(["--tiny"] if args.tiny else [])]
    passed += [f"--key={key}" for key in args.key]
    # As titanlab's own ranks have it: fewer fragments at the memory's edge. The name changed in torch 2.10.
    allocator = {f"PYTORCH_{word}ALLOC_CONF": "expandable_segments:True" for word in ("", "CUDA_")}
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, __file__, "--child", name, *map(str, passed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**allocator, **os.environ},
    )
    ended = threading.Timer(limit, process.kill)
    ended.start()
    out, err = process.communicate()
    late = not ended.is_alive()
    ended.cancel()
    events = [json.loads(each) for each in out.splitlines() if each.startswith('{"event"')]
    found = summary(events, args)
    found["wall_seconds"] = round(time.monotonic() - started, 1)
    if late:
        found["stopped"] = f"time: {limit:.0f} s were over"
    elif process.returncode:
        reason = err.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        found["stopped"] = "out of memory" if "OutOfMemoryError" in err else reason[0]
        print(err, file=sys.stderr)
    return found


def summary(events: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Figures of what a process has told, whole or cut off."""
    found: dict[str, Any] = {"peaks": [each["peak_bytes"] for each in events if each["event"] == "probed"]}
    facts = next((each for each in events if each["event"] == "facts"), None)
    steps = [each for each in events if each["event"] == "step"]
    measured = [each["seconds"] for each in steps[WARM_UP:]]
    if facts is None:
        return {**found, "memory_bytes": 0}
    found["memory_bytes"] = facts["memory_bytes"]
    found["facts"] = {key: value for key, value in facts.items() if key not in ("event", "flops_per_token")}
    found["first_step_seconds"] = steps[0]["seconds"] if steps else None
    if not measured:
        return found
    seconds = statistics.median(measured)
    speed = args.sequences * args.seq / seconds
    flops = speed * facts["flops_per_token"]
    found.update(
        steps=len(measured),
        step_seconds=seconds,
        step_seconds_all=measured,
        tokens_per_second=speed,
        tflops=flops / 1e12,
        mfu_percent=100 * flops / facts["peak_flops"] if facts["peak_flops"] else None,
        peak_memory_gib=max(each["peak_bytes"] for each in steps) / 2**30,
        loss=steps[-1]["loss"],
    )
    return found


def child(args: argparse.Namespace) -> None:
    """Be one variant: tell what happens in lines of JSON."""

    def report(event: str, **told: Any) -> None:
        print(json.dumps({"event": event, **told}), flush=True)

    if args.child != "probe":
        train(args, args.child, args.layers, steps=WARM_UP + args.steps, report=report)
        return
    for layers in PROBED:
        # The second step is the first that has an optimizer's states from the beginning.
        peak = train(args, "eager", layers, steps=2, report=report)
        report("probed", peak_bytes=peak)


def train(
    args: argparse.Namespace, variant: str, layers: int, *, steps: int, report: Any, profiled: bool = False
) -> int:
    """Some steps of a variant, as `titanlab.training.train` makes them. Returns the peak of the memory in bytes."""
    import torch

    from titanlab.cli.compose import compose
    from titanlab.costs import flops, hardware
    from titanlab.distributed.mesh import build_mesh
    from titanlab.distributed.ranks import ALONE
    from titanlab.distributed.world import open_world
    from titanlab.parallelism.gradients import Gradients
    from titanlab.recipe.recipe import resolve
    from titanlab.recipe.recipe_rules import check
    from titanlab.training.assemble import assemble
    from titanlab.training.step.batch import StepBatch
    from titanlab.training.totals import Reduction

    cuda = args.device == "cuda"
    device_name = torch.cuda.get_device_name() if cuda else "cpu"
    (recipe,) = compose(recipe_keys(args, variant, layers))
    recipe = resolve(recipe, world=None, accelerator=args.device, device=device_name)
    check(recipe)
    account = recipe.model.account()
    with open_world(ALONE, accelerator=args.device, seed=recipe.seed, deterministic=False) as world:
        device = world.device
        if cuda:
            # What a model before this one has left.
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        report(
            "facts",
            device=device_name,
            torch=torch.__version__,
            memory_bytes=torch.cuda.mem_get_info()[1] if cuda else 0,
            flops_per_token=flops.per_token(account, seq_len=args.seq),
            peak_flops=hardware.peak_flops(device_name, "bfloat16"),
        )
        assembled = assemble(recipe, world, build_mesh(recipe.layout, device.type))
        parameters = dict(assembled.model.named_parameters())
        optimizer = recipe.optimizer.implementation().build(parameters)
        gradients = Gradients(parameters.values(), world.world)
        assembled.model.train()
        assembled.after_update()
        ids = torch.randint(0, account.vocab_size, (args.sequences, args.seq + 1), device=device)
        batch = StepBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), args.sequences * args.seq)
        waiting: list[Reduction] = []

        def step() -> None:
            sums = assembled.forward_backward(batch)
            reduction = Reduction(
                world,
                squared_norm=gradients.squared_norm(),
                loss_sum=sums.loss_sum,
                tokens=sums.tokens,
                stop=0,
                nominal_tokens=recipe.tokens_per_step,
                loss_scale=assembled.loss_scale,
            )
            factor = reduction.gradient_factor(recipe.training.max_grad_norm)
            if factor is not None:
                gradients.scale(factor)
            assembled.loss_scale.step(optimizer)
            assembled.after_update()
            optimizer.zero_grad()
            waiting.append(reduction)

        # As in training, a step's totals are read while the next one is under way: the device never waits.
        peak, begin = 0, time.perf_counter()
        step()
        for _ in range(steps):
            step()
            totals = waiting.pop(0).read()
            now = time.perf_counter()
            peak = torch.cuda.max_memory_allocated() if cuda else _resident()
            report("step", seconds=now - begin, loss=totals.loss, peak_bytes=peak)
            begin = now
        if profiled:
            _profile(step, torch, cuda=cuda)
        waiting.clear()
    return peak


def _profile(step: Any, torch: Any, *, cuda: bool) -> None:
    """Print what one step's time goes to."""
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if cuda else [])]
    with torch.profiler.profile(activities=kinds) as profile:
        step()
        if cuda:
            torch.cuda.synchronize()
    order = "self_device_time_total" if cuda else "self_cpu_time_total"
    print(profile.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90))


def _resident() -> int:
    """Peak resident bytes of this process, where there is no device's own count."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def ratios(rows: dict[str, Any]) -> dict[str, float]:
    """Speed of each variant over that of compiled bf16."""
    speed = {name: row["tokens_per_second"] for name, row in rows.items() if "tokens_per_second" in row}
    return {name: each / speed[REFERENCE] for name, each in speed.items()} if REFERENCE in speed else {}


def line(name: str, row: dict[str, Any]) -> str:
    """A variant, as soon as it is over."""
    if "tokens_per_second" not in row:
        return f"{name:18} not measured: {row.get('stopped', 'too few steps')}"
    mfu = "     –" if row["mfu_percent"] is None else f"{row['mfu_percent']:5.1f}%"
    told = f"{name:18} {row['tokens_per_second']:10,.0f} tokens/s  MFU {mfu}  {row['peak_memory_gib']:6.1f} GiB"
    told += (
        f"  {row['step_seconds']:.3f} s a step, median of {row['steps']}; the first {row['first_step_seconds']:.1f} s"
    )
    return told + (f" (stopped: {row['stopped']})" if "stopped" in row else "")


def table(result: dict[str, Any]) -> None:
    """What it comes to."""
    where = f"{result.get('device', '?')}, torch {result.get('torch', '?')}, {result['date']}"
    what = f"{result['layers']} layers, {result['sequences_per_step']} × {result['seq_len']:,} tokens a step"
    print(f"\n{where}: {what}")
    for name, ratio in result["ratios"].items():
        print(f"  {name:18} {ratio:5.2f} × {REFERENCE}")


if __name__ == "__main__":
    main()
