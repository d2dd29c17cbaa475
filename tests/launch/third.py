"""A launcher of another package: the one that docs/extending.md builds, installed in a folder."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
_FILE = re.compile(r"<!-- (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)


def install_third(folder: Path) -> Path:
    """Write the package, as installed; returns the folder that PYTHONPATH has to have."""
    installed = folder / "third"
    info = installed / "nohup_jobs-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nohup-jobs\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[titanlab.options]\nnohup = nohup_jobs.launch_schema\n[titanlab.conf]\nnohup_jobs = nohup_jobs.conf\n"
    )
    for name, text in _FILE.findall(PAGE.read_text()):
        if name.startswith("nohup_jobs/"):
            path = installed / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return installed
