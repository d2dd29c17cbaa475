"""One product for several linear layers with the same input, which keep their parameters; see docs/decisions/0040."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from titanlab.costs import Joined
from titanlab.errors import ConfigError
from titanlab.parallelism.pipeline_weights import products
from titanlab.parallelism.tensor import TensorParallel
from titanlab.techniques.model.language_model import Projections
from titanlab.techniques.precision.product import JOINED, take_over


def join_products(model: nn.Module, joined: Iterable[Joined], cut: TensorParallel | None) -> None:
    """Compute layers of a model or stage as one product, in place.

    Args:
        cut: how tensor parallelism has cut the layers; None: it has not.

    Raises:
        ConfigError: a layer has a forward or a product of its own.
    """
    for product in joined:
        for path, module in list(model.named_modules()):
            if path.count(".") == product.caller.count(".") and fnmatch.fnmatchcase(path, product.caller):
                assert isinstance(module, Projections), path
                owner, _, own_name = path.rpartition(".")
                parent = model.get_submodule(owner)
                setting: Any = {"key": "model.fused", "value": "true", "cure": "try false"}
                take_over(module, path, like=Projections, **setting)
                layers = {name: parent.get_submodule(name) for name in product.layers}
                found = [take_over(layer, f"{owner}.{name}", **setting) for name, layer in layers.items()]
                if any(other is not found[0] for other in found) or not found[0].splits:
                    rule = f"multiplies {', '.join(layers)} of {owner} as one, and they have no product in common"
                    raise ConfigError(**setting, rule=rule)
                for name, layer in layers.items():
                    # A bias would be added to each part, for which there is no code.
                    assert getattr(layer, "bias", None) is None, f"{owner}.{name}"
                    setattr(layer, JOINED, path)
                copied = tuple(name in product.copied for name in product.layers)
                parent.add_module(own_name, JoinedProjections(copied, cut))


class JoinedProjections(Projections):
    """Multiplies an input with the weights of all layers at once.

    Args:
        copied: for each layer, whether its output gets its own memory; the others are parts of one tensor.
    """

    def __init__(self, copied: tuple[bool, ...], cut: TensorParallel | None) -> None:
        super().__init__()
        self.copied, self.cut = copied, cut

    def forward(self, inputs: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        outputs = products(layers, inputs, self.copied)
        cut = self.cut
        return outputs if cut is None else tuple(cut.by_sequence(output) for output in outputs)
