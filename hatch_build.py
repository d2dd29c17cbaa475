"""Puts YAMLs, constraints.txt and two pages of docs/ into a wheel.

They live beside the package in a clone, and inside it when installed.

`[tool.hatch.build.targets.wheel.force-include]` would copy them into an editable installation too, where the copies
would soon be old.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ConfigFolders(BuildHookInterface):
    """Maps conf/ to titanlab/conf/; groups that are links in it (conf/launch, conf/sweeps) become folders."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the folder to a build that is not an editable one."""
        if version != "editable":
            build_data["force_include"]["conf"] = "titanlab/conf"
            # `titanlab doctor` compares what is installed with what was tested.
            build_data["force_include"]["constraints.txt"] = "titanlab/constraints.txt"
            # `titanlab combinations` names their rows.
            for page in ("docs/parity.md", "docs/techniques.md"):
                build_data["force_include"][page] = f"titanlab/{page}"
