"""`titanlab generate RUN`: generate text with a run's latest checkpoint, or with a folder of weights."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from titanlab.checkpoint.folders import find
from titanlab.cli.arguments import Arguments
from titanlab.distributed.host import this_host
from titanlab.errors import ConfigError
from titanlab.records.run_search import find_run
from titanlab.system.files import user_path
from titanlab.system.terminal import Console
from titanlab.system.text import harmless_lines
from titanlab.train.interchange import is_weights


def main(arguments: Sequence[str]) -> int:
    """Print the prompt, and then the generated text as it is sampled."""
    parser = Arguments("generate", "Write text with a run's latest checkpoint, or with weights of a folder.")
    parser.add_argument("run", help="the run's folder, name, or the first digits of its hash; or a folder of weights")
    parser.add_argument("--prompt", default="", help="what the text begins with")
    parser.add_argument("--tokens", type=int, default=200, help="tokens at most (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=50, help="among this many likeliest; 0: all (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default 0)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--runs", default="runs", help="the folder of runs (default runs)")
    args = parser.parse_args(arguments)
    for name, least in (("tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
        # `not … >=`, because `nan < least` is False.
        if not getattr(args, name) >= least:
            raise ConfigError(
                f"--{name.replace('_', '-')}", getattr(args, name), f"must be at least {least}", f"try {least}"
            )
    _check_device(args.device)
    folder = user_path(args.run)
    if not is_weights(folder):
        folder = find_run(args.run, args.runs).path
        find(str(folder), "run")
    # Imported here, so that a mistake in the arguments is reported without waiting for torch.
    from titanlab.train.generate import generate

    pieces = generate(
        folder,
        args.prompt,
        tokens=args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
        device=args.device,
        warn=Console().warn,
    )
    pieces = itertools.chain([args.prompt + next(pieces, "")], pieces, ["\n"])
    for piece in pieces:
        print(harmless_lines(piece) if sys.stdout.isatty() else piece, end="", flush=True)
    return 0


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ConfigError("--device", device, "is no device", "try cpu or cuda")
    if device == "cuda" and this_host().accelerator != "cuda":
        raise ConfigError("--device", device, "this host shows no GPU", "try cpu")
