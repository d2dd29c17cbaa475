"""Says as one JSON object what this machine is; a process of its own, because it imports torch."""

from __future__ import annotations

import importlib.util
import json
from importlib.metadata import PackageNotFoundError, version

# Without these no row can run; others are needed by some rows.
NEEDED = {
    "hydra": "hydra-core",
    "omegaconf": "omegaconf",
    "antlr4": "antlr4-python3-runtime",
    "lazy_loader": "lazy_loader",
    "msgspec": "msgspec",
    "packaging": "packaging",
    "yaml": "pyyaml",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "xxhash": "xxhash",
}
OTHERS = {
    "torchao": "torchao",
    "flash_attn": "flash-attn",
    "flash_attn_interface": "flash-attn-3",
    "pytest": "pytest",
    "hypothesis": "hypothesis",
    "xdist": "pytest-xdist",
}


def packages() -> dict[str, str | None]:
    """Names of modules → versions; None: not installed."""
    versions: dict[str, str | None] = {}
    for module, name in {**NEEDED, **OTHERS}.items():
        versions[module] = None
        if importlib.util.find_spec(module) is not None:
            try:
                versions[module] = version(name)
            except PackageNotFoundError:
                versions[module] = "?"
    return versions


def main() -> None:
    """Print them."""
    import torch

    facts: dict[str, object] = {"device": "cpu", "torch": torch.__version__, "packages": packages()}
    if torch.cuda.is_available():
        facts.update(
            device=torch.cuda.get_device_name(),
            memory_bytes=torch.cuda.mem_get_info()[1],
            capability=torch.cuda.get_device_capability(),
            uuid=f"GPU-{torch.cuda.get_device_properties(0).uuid}",
            gpus=torch.cuda.device_count(),
        )
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
