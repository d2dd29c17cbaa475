"""Slurm's messages in a job's logs about processes that it killed because of their memory."""

from __future__ import annotations

import re
from pathlib import Path

from titanlab.launch.contract import MemoryWord
from titanlab.records.logs import text_at_end

# From slurmstepd, which watches a step: by its own count of memory (OverMemoryKill), or by that of the control group.
# "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed."
# "slurmstepd-n1: error: StepId=12.0 exceeded memory limit (1176580096 > 1073741824), being killed"
_SENTENCE = re.compile(
    r"slurmstepd[^:]*: error: (?P<said>.*(?:oom[-_ ]?kill|exceeded (?:\w+ )?memory limit).*)$", re.IGNORECASE
)
# From srun, for one task or several: "srun: error: n1: task 1: Out Of Memory", "srun: error: n1: tasks 0-1: Killed".
_TASK = re.compile(r"srun: error: \S+ task (?P<rank>\d+): (?P<how>Out Of Memory|Killed)\s*$")
_TASKS = re.compile(r"srun: error: \S+ tasks \S+: (?:Out Of Memory|Killed)\s*$")


def memory_word(jobs: Path, job_id: str) -> MemoryWord | None:
    """Slurm's message about memory in the logs of a job; None if there is none.

    Args:
        jobs: the folder of the logs.
        job_id: with its index in the array: 12_3.
    """
    sentences: list[str] = []
    ranks: dict[str, set[int]] = {"Out Of Memory": set(), "Killed": set()}
    several = False
    for path in sorted(jobs.glob(f"{job_id}_*_log.err")):
        for line in text_at_end(path).splitlines():
            if (match := _SENTENCE.search(line)) is not None:
                sentences.append(match["said"].strip())
            elif (match := _TASK.search(line)) is not None:
                ranks[match["how"]].add(int(match["rank"]))
            elif _TASKS.search(line) is not None:
                several = True
    if not sentences:
        return None
    # "Killed" also names tasks that were ended because another task had exceeded its memory.
    named = ranks["Out Of Memory"] or (ranks["Killed"] if not several else set())
    message = next((sentence for sentence in sentences if "StepId=" in sentence), sentences[0])
    return MemoryWord(message[:300], named.pop() if len(named) == 1 else None)
