"""The choice of the model family for a config.json of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titanlab.errors import ConfigError
from titanlab.model.contract import HuggingFaceFamily, ModelConfig
from titanlab.options import discover


def family_for(config: Mapping[str, Any]) -> HuggingFaceFamily[Any]:
    """The family that can read the model of a config.json.

    Raises:
        ConfigError: no installed model supports the architecture.
    """
    architectures = config.get("architectures") or []
    architecture = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else architectures
    known: dict[str, HuggingFaceFamily[Any]] = {}
    for option in discover()["model"].values():
        schema: type[ModelConfig] = option.schema
        if (family := schema.hugging_face()) is not None:
            known.update(dict.fromkeys(family.architectures, family))
    if isinstance(architecture, str):
        # AutoModel saves a LlamaForCausalLM without its output head, as LlamaModel.
        whole = f"{architecture.removesuffix('Model')}ForCausalLM"
        architecture = whole if whole in known else architecture
    if not isinstance(architecture, str) or architecture not in known:
        rule = "is no architecture that is computed here"
        cure = f"supported: {', '.join(sorted(known))}"
        raise ConfigError("config.json:architectures", architecture or None, rule, cure)
    return known[architecture]
