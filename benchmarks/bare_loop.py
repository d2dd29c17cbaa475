"""The loop that a person writes in an afternoon: what titanlab's own cost is measured against.

Same model, same optimizer, same clipping, random tokens; nothing is recorded but step times, as one JSON
line. With --fsdp it is run under torchrun and shards each block with `fully_shard`.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
import torch.nn.functional as F

from titanlab.model import llama
from titanlab.model.llama_schema import Llama


def main() -> None:
    """Train and print `{"first_step_at": epoch seconds, "step_seconds": […], "loss": …}`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="sequences of one process")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--bf16", action="store_true", help="forward and backward under autocast")
    parser.add_argument("--fsdp", action="store_true")
    for name, value in (("dim", 256), ("layers", 6), ("heads", 8), ("kv-heads", 4), ("ffn-dim", 768), ("vocab", 2048)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    config = Llama(
        dim=args.dim,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads,
        ffn_dim=args.ffn_dim,
        vocab_size=args.vocab,
    )
    torch.manual_seed(0)
    model = llama.Llama(config, seq_len=args.seq)
    model.init_buffers(torch.device("cpu"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)
    if args.fsdp:
        _shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    seconds = []
    first_step_at = None
    loss_value = 0.0
    for _ in range(args.steps):
        start = time.perf_counter()
        window = torch.randint(0, args.vocab, (args.batch, args.seq + 1), generator=generator)
        tokens, labels = window[:, :-1].contiguous(), window[:, 1:].contiguous()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.bf16):
            logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss_value = loss.item()
        seconds.append(time.perf_counter() - start)
        first_step_at = first_step_at or time.time()
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"first_step_at": first_step_at, "step_seconds": seconds, "loss": loss_value}), flush=True)
    if args.fsdp:
        torch.distributed.destroy_process_group()


def _shard(model: torch.nn.Module) -> None:
    # Half a second that one process does not need.
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    for block in model.layers.values():
        fully_shard(block)
    fully_shard(model)


if __name__ == "__main__":
    main()
