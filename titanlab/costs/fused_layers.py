"""The linear layers whose product and collective AsyncTP makes one operation in eager mode. Torch-free."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from titanlab.costs.account import ModelAccount
from titanlab.costs.linear_layers import linear_layers


class FusedLayers(NamedTuple):
    """Paths in a model.

    gathering: callers of layers with the same input, which gather the residual stream and multiply it
    scattering: layers that multiply and sum into the residual stream
    """

    gathering: tuple[str, ...]
    scattering: tuple[str, ...]

    @property
    def total(self) -> int:
        """Products of a microbatch's forward pass; the backward has as many."""
        return len(self.gathering) + len(self.scattering)


def fused_layers(model: ModelAccount, converted: Collection[str]) -> FusedLayers:
    """The layers of a model with its layout's tensor plan.

    What a module gathers for all its layers is gathered in their products only if one `Projections` calls them all.

    Args:
        converted: paths of layers that do not multiply in the compute precision.
    """
    styles = {name: model.plan.style_of(name) for name in linear_layers(model)}
    readers = {name for name, style in styles.items() if style == "colwise"}
    gathering = []
    for projections in model.projections or model.joined:
        for number, layers in enumerate(projections.paths(model.layers)):
            owner = layers[0].rpartition(".")[0]
            inside = {name for name in readers if name.startswith(f"{owner}.")}
            # The operator adds no bias.
            is_plain = inside.isdisjoint(converted) and not any(f"{name}.bias" in model.parameters for name in inside)
            if model.plan.style_of(owner) == "gathered" and inside == {*layers} and is_plain:
                gathering.append(projections.caller.replace("*", str(number), 1))
    scattering = [name for name, style in styles.items() if style == "rowwise" and name not in converted]
    return FusedLayers(tuple(gathering), tuple(scattering))
