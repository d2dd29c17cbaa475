"""Settings of Hydra: overrides of those that titanlab reads, and of those that would have no effect."""

import pytest

from titanlab.errors import ConfigError
from titanlab.recipe.strangers import check_overrides

RULE = "is a setting of Hydra's that titanlab does not read"
FOLDER = "a run's folder is runs/SWEEP/NAME: give runs=FOLDER, sweep=NAME or name=NAME"
LOGS = "leave it out: a run has its logs in its own folder"


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "hydra.searchpath=[file:///x]",
        "hydra.sweeper.where=[]",
        "hydra.launcher.x=1",
        "hydra/sweeper=space",
        "hydra.job.name=mine",
        "hydra.help.header=x",
        "hydra.hydra_help.template=x",
        # Hydra itself reports what it does not know.
        "hydra.nope=1",
        "hydrant.run=1",
        "model.hydra.run=1",
    ],
)
def test_what_is_read_or_is_none_of_hydras_is_taken(override):
    check_overrides([override])


@pytest.mark.parametrize(
    ("override", "key", "cure"),
    [
        ("hydra.run.dir=x", "hydra.run.dir", FOLDER),
        ("hydra.run=x", "hydra.run", FOLDER),
        ("++hydra.sweep.subdir=x", "hydra.sweep.subdir", FOLDER),
        ("~hydra.output_subdir", "hydra.output_subdir", "leave it out: a run has its recipe in config.yaml of its folder"),
        ("hydra.mode=MULTIRUN", "hydra.mode", "add -m for several points, or use titanlab sweep"),
        ("hydra.job.chdir=true", "hydra.job.chdir", FOLDER),
        # Not all of a job is read, and no key that only begins like one that is.
        ("hydra.job={name:x}", "hydra.job", "leave it out"),
        ("hydra.job.name_of_it=x", "hydra.job.name_of_it", "leave it out"),
        ("hydra.job.env_set.A=b", "hydra.job.env_set.A", "set it in the shell, or with launch=slurm in launch.environment"),
        ("hydra.job_logging.root.level=DEBUG", "hydra.job_logging.root.level", LOGS),
        ("hydra/job_logging=default", "hydra/job_logging", LOGS),
        ("hydra/hydra_logging@x=default", "hydra/hydra_logging@x", LOGS),
        ("hydra.verbose=true", "hydra.verbose", LOGS),
        ("hydra.callbacks.x=1", "hydra.callbacks.x", "leave it out: nothing calls them here"),
        ("hydra.runtime.cwd=/x", "hydra.runtime.cwd", "leave it out"),
        ("hydra={run:{dir:x}}", "hydra", "leave it out: titanlab train --help has the keys of a recipe"),
        ("~hydra", "hydra", "leave it out: titanlab train --help has the keys of a recipe"),
    ],
)  # fmt: skip
def test_what_would_have_no_effect_is_refused(override, key, cure):
    with pytest.raises(ConfigError) as raised:
        check_overrides(["seed=1", override])
    assert (raised.value.key, raised.value.rule, raised.value.cure) == (key, RULE, cure)
