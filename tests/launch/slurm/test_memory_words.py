"""What Slurm writes into a job's logs when it ends processes for their memory."""

import os

import pytest

from titanlab.launch import MemoryWord
from titanlab.launch.slurm.states import memory_word

EVENT = "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed."
SAID = EVENT.partition("error: ")[2]
LIMIT = "slurmstepd-n1: error: StepId=12.0 exceeded memory limit (1176580096 > 1073741824), being killed"


@pytest.mark.parametrize(
    ("logs", "word"),
    [
        ({0: f"{EVENT}\nsrun: error: n1: task 1: Out Of Memory\n"}, MemoryWord(SAID, 1)),
        # The others were ended because of it.
        (
            {0: f"{EVENT}\nsrun: error: n2: task 3: Out Of Memory\nsrun: error: n1: task 0: Killed\n"},
            MemoryWord(SAID, 3),
        ),
        ({0: "srun: error: n2: task 3: Killed\n", 3: f"noise\n{EVENT}\n"}, MemoryWord(SAID, 3)),
        ({0: f"slurmstepd-n1: error: Exceeded job memory limit\n{LIMIT}\n"}, MemoryWord(LIMIT[22:], None)),
        ({0: f"{LIMIT}\nsrun: error: n1: tasks 0-1: Killed\n"}, MemoryWord(LIMIT[22:], None)),
        (
            {0: f"{LIMIT}\nsrun: error: n1: tasks 0-1: Killed\nsrun: error: n2: task 2: Killed"},
            MemoryWord(LIMIT[22:], None),
        ),
        ({0: "srun: error: n1: task 1: Killed\n"}, None),
        ({0: "slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-11-22T15:26:06 ***\n"}, None),
        ({}, None),
    ],
)
def test_sentence_and_rank(tmp_path, logs, word):
    for rank, text in logs.items():
        (tmp_path / f"12_3_{rank}_log.err").write_text(text)
    (tmp_path / "12_33_0_log.err").write_text(f"{EVENT}\nsrun: error: n1: task 9: Out Of Memory\n")
    assert memory_word(tmp_path, "12_3") == word


def test_a_pipe_in_the_place_of_a_log_says_nothing_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "12_3_0_log.err")
    (tmp_path / "12_3_1_log.err").write_text(EVENT)
    assert memory_word(tmp_path, "12_3") == MemoryWord(SAID, None)
