"""The answer of `titanlab best` from a frame."""

from tests.sweep.made import SUMMARY, begin, end, train
from titanlab.costs import meter
from titanlab.report import frames
from titanlab.report.analyses import ranking_text


def test_the_first_is_named_if_the_gap_is_more_than_noise(made):
    for name, shard, speeds in (("single", 1, (1000.0, 1010.0, 1005.0)), ("fsdp", 2, (500.0, 505.0, 495.0))):
        for repeat, speed in enumerate(speeds):
            run = made.run(name, shard=shard, repeat=repeat)
            begin(run, cores=8)
            train(run)
            end(run, metrics={**SUMMARY, meter.TOKENS_PER_SECOND: speed, "memory/max_resident(GiB)": shard * 0.5})
    runs = frames.sweep_frame(made.folder.path)
    sentence, *table = ranking_text(runs).splitlines()
    assert sentence.startswith("single")
    assert "more than dp_s2" in sentence
    assert sum(" 3  " in line for line in table) == 2
    assert ranking_text(runs, "memory").startswith("single")
    assert "more than" not in ranking_text(runs, max_memory_gib=0.75).splitlines()[0]


def test_a_sweep_without_runs_says_so(made):
    made.drop("rule", "breaks a rule", parallelism="tp")
    assert ranking_text(frames.sweep_frame(made.folder.path))
