"""A submission, and what squeue and sacct print of its jobs; no program is started."""

from titanlab.launch import JobShape, Submission
from titanlab.launch.slurm import command as slurm_command
from titanlab.launch.slurm import launcher as slurm_launcher
from titanlab.launch.slurm import site as slurm_site
from titanlab.launch.slurm.command import Reply
from titanlab.sweep.reconcile import job_states

LONG_AGO = 1_700_000_000.0


def submission(token="aa", runs=("one", "two", "three"), *, launcher="slurm", state="submitted", created=LONG_AGO):
    shape = JobShape(processes=1, tasks_per_node=1)
    given = {"code": "code", "shape": shape, "launch": {}, "runs": runs, "created": created, "state": state}
    return Submission(token=token, launcher=launcher, job_id="12", **given)


class Answers(dict):
    """What each command prints, None where it does not answer; and what they were asked."""

    def __init__(self, monkeypatch):
        super().__init__(squeue="", sacct="")
        self.asked = []
        for module in (slurm_command, slurm_site, slurm_launcher):
            monkeypatch.setattr(module, "ask_slurm", self.ask)

    def ask(self, *words, seconds=0.0):
        self.asked.append(words)
        said = self[words[0]]
        if isinstance(said, Reply):
            return said
        return Reply(output=said, problem=f"{words[0]} says: nothing" if said is None else None)


def states(tmp_path, *submitted):
    found = job_states(submitted or (submission(),), tmp_path)
    return [found[key] for key in sorted(found)]
