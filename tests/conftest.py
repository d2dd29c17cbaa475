"""Settings of every test: one thread, no network, caches inside the checkout; skipped tests can be forbidden."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import workers
from tests.pool import Pool
from titanlab.distributed import this_host
from titanlab.techniques.compile import cache as compiler_cache

# Until the tests are collected: imports and collection make a million objects that stay.
gc.disable()

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache"

# Set before anything imports torch or another library that reads them at import.
os.environ.update(
    # One thread in each process: several ranks share few cores, and sums keep their order.
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    OPENBLAS_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    # Tests neither write to a home folder nor use the network.
    TITANLAB_CACHE=str(CACHE / "titanlab"),
    TORCHINDUCTOR_CACHE_DIR=str(CACHE / "inductor"),
    HF_HOME=str(CACHE / "huggingface"),
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    # Sweeps record to wandb by default. Tests of wandb choose a mode of their own.
    WANDB_MODE="disabled",
    WANDB_SILENT="true",
    WANDB_CACHE_DIR=str(CACHE / "wandb"),
    WANDB_CONFIG_DIR=str(CACHE / "wandb"),
    WANDB_DATA_DIR=str(CACHE / "wandb"),
    **compiler_cache.ENVIRONMENT,
)
# Settings of the person or the job that runs the tests must not reach them.
for _name in list(os.environ):
    if _name in (
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "HYDRA_FULL_ERROR", "HF_TOKEN", "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_DIR",
    ) or _name.startswith(("SLURM_", "TORCHELASTIC_")):  # fmt: skip
        del os.environ[_name]

_ENVIRONMENT = dict(os.environ)

hypothesis.settings.register_profile(
    # No deadline for an example: the machine may be busy with other ranks.
    "titanlab",
    deadline=None,
    max_examples=50,
    # In CI the examples are the same in every run.
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("titanlab")


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Processes for tests of several ranks: `pool.run(world, function, *arguments)`."""
    with compiler_cache.attempt_folder(CACHE / "inductor", f"tests-{os.getpid()}") as folder:
        workers = Pool(
            int(os.environ.get("TITANLAB_TEST_WORKERS", "16")),
            warning_filters=request.config.getini("filterwarnings"),
            environment=_ENVIRONMENT | {compiler_cache.VARIABLE: str(folder)},
        )
        yield workers
        workers.close()
        if not request.session.testsfailed:
            compiler_cache.publish(folder)


@pytest.fixture(scope="session")
def traces(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """The trace of a recipe by its keys (`tests.tiny.recipe`), as rank 0 has it; one process is trained once."""
    from tests import tiny

    known: dict[str, Any] = {}

    def train(**keys: Any) -> Any:
        key = repr(sorted(keys.items()))
        if key not in known:
            made = tiny.recipe(tmp_path_factory.mktemp("run"), **keys)
            # Inductor has a C++ compiler at work.
            every = pool.run(made.world, tiny.traced, made, tiny.begin(made), limit_seconds=500)
            # What all ranks are told is the same to the last bit.
            assert all(each.losses == every[0].losses and each.grad_norms == every[0].grad_norms for each in every)
            if made.world > 1:
                return every[0]
            known[key] = every[0]
        return known[key]

    return train


# Commits after which CI has run every covering row of the slower layer.
COVERING_TURNS = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        metavar="K/N",
        default="",
        help="of the slower layer, run a third of the covering rows and part K of N of the others",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests whose GPU, Slurm or browser this machine lacks, and say at the end how many they are."""
    lacking = {}
    if this_host().accelerator != "cuda":
        lacking["gpu"] = "a GPU were not selected: this machine has none"
    if slurm_lacks():
        lacking["slurm"] = "Slurm were not selected: it is not installed here (make test-slurm does both)"
    if browser_lacks():
        lacking["browser"] = "a browser were not selected: none is installed here (make test-browser does both)"
    lines = []
    for marker, reason in lacking.items():
        left_out = [item for item in items if item.get_closest_marker(marker)]
        if left_out:
            lines.append(f"{len(left_out)} tests that need {reason}")
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker(marker)]
    if config.option.part:
        select_part(config, items)
    config.stash[_LEFT_OUT] = lines
    if hasattr(config, "workerinput"):
        # Only the main process prints a summary.
        config.workeroutput["left_out"] = lines


def select_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the slower layer, keep every third covering row and every N-th of the other rows; K says where both begin."""
    part, parts = map(int, config.option.part.split("/"))
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--part {config.option.part}: the first number must be between 1 and the second")
    rows = [item for item in items if item.get_closest_marker("full")]
    covering = [item for item in rows if item.get_closest_marker("covering")]
    others = [item for item in rows if item not in set(covering)]
    left_out = {*rows} - {*covering[part % COVERING_TURNS :: COVERING_TURNS], *others[part - 1 :: parts]}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let collections of garbage pass over what is imported and collected by now, a million objects that stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    workers.check(item)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, run the tests of ranks on few workers."""
    return workers.RanksTogether(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take from a worker that has ended which tests were left out. All workers collect the same tests."""
    if error is None:
        node.config.stash[_LEFT_OUT] = node.workeroutput.get("left_out", [])


def slurm_lacks() -> list[str]:
    """Programs that a Slurm started by the tests needs and that are not installed."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return [
        name
        for name in ("sbatch", "slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd")
        if not shutil.which(name, path=path)
    ]


def browser_lacks() -> list[str]:
    """Programs that tests of pages need and that are not installed."""
    return [name for name in ("chromium", "pdftoppm") if not shutil.which(name)]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print one line for each kind of tests that were left out."""
    for line in config.stash.get(_LEFT_OUT, []):
        terminalreporter.write_line(line)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Report a skipped test as failed if skipping is forbidden."""
    return _fail_if_forbidden((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    """Report a skipped file as failed if skipping is forbidden."""
    return _fail_if_forbidden((yield))


def _fail_if_forbidden(report: Any) -> Any:
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("TITANLAB_FORBID_SKIPS") == "1":
        report.outcome = "failed"
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.longrepr = f"skipped, which TITANLAB_FORBID_SKIPS=1 forbids: {reason}"
    return report


_LEFT_OUT = pytest.StashKey[list[str]]()
