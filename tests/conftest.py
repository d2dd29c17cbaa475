"""What holds for every test: one thread, no network, caches of their own, warnings and skips that count."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.pool import Pool
from titanlab.compile.cache import repair
from titanlab.distributed.host import this_host

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache"

# Before anything imports torch or a library that reads them at import.
os.environ.update(
    # One thread in each process: several ranks share few cores, and sums keep their order.
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    OPENBLAS_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    # Nothing leaves the checkout: not for a home folder, not for a network.
    TITANLAB_CACHE=str(CACHE / "titanlab"),
    TORCHINDUCTOR_CACHE_DIR=str(CACHE / "inductor"),
    HF_HOME=str(CACHE / "huggingface"),
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    WANDB_CACHE_DIR=str(CACHE / "wandb"),
    WANDB_CONFIG_DIR=str(CACHE / "wandb"),
    WANDB_DATA_DIR=str(CACHE / "wandb"),
)
# A person's own settings, or the job in which the tests run, must not decide what they see.
for _name in list(os.environ):
    if _name in (
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "HYDRA_FULL_ERROR", "HF_TOKEN", "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_DIR",
    ) or _name.startswith(("SLURM_", "TORCHELASTIC_")):  # fmt: skip
        del os.environ[_name]

hypothesis.settings.register_profile(
    # The machine may be busy with other ranks: no example has a deadline of its own.
    "titanlab",
    deadline=None,
    max_examples=50,
    # A submission is judged by the same examples however often it is tried.
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("titanlab")


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Workers for tests of several ranks: `pool.run(world, function, *arguments)`."""
    # A session that was ended while a compiler ran has left half a file, as a run does.
    repair(CACHE / "inductor")
    workers = Pool(
        int(os.environ.get("TITANLAB_TEST_WORKERS", "16")), warning_filters=request.config.getini("filterwarnings")
    )
    yield workers
    workers.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests out that need what is not here: a GPU, Slurm's daemons."""
    lacking = {}
    if this_host().accelerator != "cuda":
        lacking["gpu"] = "a GPU were not selected: this machine has none"
    if slurm_lacks():
        lacking["slurm"] = "Slurm were not selected: it is not installed here (make test-slurm does both)"
    config.stash[_LEFT_OUT] = []
    for marker, why in lacking.items():
        left_out = [item for item in items if item.get_closest_marker(marker)]
        if left_out:
            config.stash[_LEFT_OUT].append(f"{len(left_out)} tests that need {why}")
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker(marker)]


def slurm_lacks() -> list[str]:
    """What a Slurm of the tests' own would need, and is not installed."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return [
        name
        for name in ("sbatch", "slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd")
        if not shutil.which(name, path=path)
    ]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say in one line each what was left out."""
    for line in config.stash.get(_LEFT_OUT, []):
        terminalreporter.write_line(line)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Where skipping is forbidden, a skipped test has failed."""
    return _forbidden((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    """Where skipping is forbidden, a skipped file has failed."""
    return _forbidden((yield))


def _forbidden(report: Any) -> Any:
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("TITANLAB_FORBID_SKIPS") == "1":
        report.outcome = "failed"
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.longrepr = f"skipped, which TITANLAB_FORBID_SKIPS=1 forbids: {reason}"
    return report


_LEFT_OUT = pytest.StashKey[list[str]]()
