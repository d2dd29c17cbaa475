"""What tests of figures share."""

import pytest

from tests.sweep.made import SUMMARY, begin, end, train
from titanlab.costs import meter


@pytest.fixture
def mixed(made):
    """Two recipes that are done, one of them oversubscribed and thrice, one that failed, one under way, two dropped."""
    for repeat, speed in enumerate((900.0, 1000.0, 1100.0)):
        run = made.run("fsdp", shard=2, repeat=repeat)
        begin(run, cores=1)
        train(run, losses=[5.0, 4.0, 3.0])
        end(run, metrics={**SUMMARY, meter.TOKENS_PER_SECOND: speed})
    single = made.run("single")
    begin(single)
    train(single, losses=[5.0, 4.0, 3.0])
    end(single, metrics={**SUMMARY, meter.TOKENS_PER_SECOND: 3000.0})
    failed, running = made.run("tp", tensor=2), made.run("cp", context=2)
    begin(failed)
    end(failed, "oom")
    begin(running)
    train(running, losses=[5.0, 4.5])
    made.drop("rule", "no", parallelism="tp3")
    made.drop("where", "no", parallelism="tp5")
    return made
