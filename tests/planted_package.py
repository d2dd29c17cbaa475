"""The tests' own data as a third party brings an option: a package that is installed, and a config beside it."""

from pathlib import Path


def install_planted(folder: Path) -> Path:
    """Install `data=planted` in a folder, with its config in `conf/data`; returns what PYTHONPATH has to have."""
    package = folder / "installed" / "planted-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[titanlab.options]\nplanted = tests.planted_schema\n")
    configs = folder / "conf" / "data"
    configs.mkdir(parents=True)
    (configs / "planted.yaml").write_text("defaults: [planted_schema, _self_]\n")
    return package.parent
