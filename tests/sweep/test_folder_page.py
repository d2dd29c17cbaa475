"""docs/run-folder.md says what a sweep's folder holds, all of it."""

import json

from tests.records.test_run_folder_page import keys
from tests.sweep.conftest import quiet
from tests.sweep.studies import SLURM, seeds, study
from titanlab.records import RECORD
from titanlab.sweep.submit import submit


def test_every_file_and_every_key(slurm, tmp_path):
    folder = submit(study(tmp_path / "runs", seeds(2), launch=SLURM), quiet).folder
    (submission,) = folder.submissions()
    told = keys("A sweep's folder")
    runs = {run.path.name for run in folder.runs()}
    names = {path.name for path in folder.path.iterdir() if not path.name.startswith(".")}
    assert names - runs <= {word.split("/")[0] for word in told}
    files = [folder.path / "sweep.json", folder.path / submission.code / RECORD]
    files += (folder.path / "submissions").rglob("*.json")
    assert len(files) == 3
    for text in [*(file.read_text() for file in files), *(folder.path / "points.jsonl").read_text().splitlines()]:
        assert set(json.loads(text)) - {"schema"} <= told, text
    assert set(submission.shape.to_mapping()) <= told
