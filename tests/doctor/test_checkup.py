"""Which checks there are, what they ask the launchers, and that one which hangs or fails is a line of the report."""

import threading
import time
from dataclasses import dataclass

import pytest

from titanlab.doctor import checks, checkup, run_checks
from titanlab.doctor.checkup import Check
from titanlab.errors import ConfigError
from titanlab.launch import LaunchConfig, Launcher
from titanlab.launch.launchers_schema import Local, Slurm
from titanlab.system import ok

# Before those of the launchers.
SECTIONS = ("software", "devices", "host", "storage")


class PagerLauncher(Launcher):
    def __init__(self, config):
        self._config = config

    def findings(self):
        yield ok("pager", f"calls {self._config.number}")


@dataclass(frozen=True, kw_only=True)
class Pager(LaunchConfig):
    """A launcher of another package."""

    kind: str = "pager"
    number: int = 112

    def implementation(self):
        return PagerLauncher(self)


@pytest.fixture
def third(monkeypatch):
    monkeypatch.setattr(checkup, "discover", lambda: {"launch": {"local": Local, "pager": Pager}})
    monkeypatch.setattr(checkup, "default_config", lambda kind: {"local": Local, "pager": Pager}[kind]())


def test_sections_are_in_order(tmp_path):
    found = [check.section for check in checks(tmp_path, None)]
    assert list(dict.fromkeys(found)) == [*SECTIONS, "local", "Slurm"]


@pytest.mark.parametrize(("launch", "needed"), [(None, []), (Local(), ["local"]), (Slurm(), ["Slurm"]), (Pager(), [])])
def test_a_launcher_is_needed_if_the_user_names_it(tmp_path, launch, needed):
    found = [check for check in checks(tmp_path, launch) if check.section not in SECTIONS]
    assert [check.name for check in found if check.is_needed] == needed


@pytest.mark.parametrize(("launch", "number"), [(None, 112), (Pager(number=911), 911)])
def test_a_launcher_of_another_package_says_what_it_finds_with_the_settings_of_the_user(
    tmp_path, third, launch, number
):
    own = [check for check in checks(tmp_path, launch) if check.section not in SECTIONS]
    found = {check.section: findings for check, findings in run_checks(own)}
    assert found == {"local": [], "pager": [ok("pager", f"calls {number}")]}


@pytest.mark.parametrize(("launch", "state"), [(None, "ok"), (Local(), "ok"), (Slurm(), "warn"), (Pager(), "warn")])
def test_a_folder_of_runs_that_only_this_host_sees_is_a_warning_where_jobs_run_elsewhere(
    tmp_path, monkeypatch, launch, state
):
    monkeypatch.setattr(checkup.host, "_SHARED", ())
    monkeypatch.setattr(checkup.host, "_IN_MEMORY", ())
    (check,) = [check for check in checks(tmp_path, launch) if check.name == "folder of runs"]
    assert {each.name: each.state for each in check.find()}["file system"] == state


def test_a_launcher_whose_config_cannot_be_made_is_a_warning(tmp_path, monkeypatch):
    def made(kind):
        if kind == "pager":
            raise ConfigError("launch", kind, "cannot be made", "give it defaults")
        return Local()

    monkeypatch.setattr(checkup, "discover", lambda: {"launch": {"local": Local, "pager": Pager}})
    monkeypatch.setattr(checkup, "default_config", made)
    own = [check for check in checks(tmp_path, None) if check.section == "pager"]
    ((_, (finding,)),) = run_checks(own)
    assert (finding.state, finding.text) == ("warn", "launch=pager: cannot be made; give it defaults")


def test_a_check_that_hangs_or_raises_is_a_finding_and_delays_nobody():
    forever = threading.Event()

    def hang():
        forever.wait(60)
        return []

    def broken():
        yield ok("first", "is lost with the rest")
        raise OSError(5, "Input/output error")

    checks = [
        Check(section="a", name="disk", find=hang, seconds=0.2),
        Check(section="a", name="clock", find=hang, seconds=0.2, is_needed=False),
        Check(section="b", name="driver", find=broken),
        Check(section="b", name="good", find=lambda: [ok("good", "works")]),
    ]
    begin = time.monotonic()
    found = [(check.name, [(each.state, each.text) for each in findings]) for check, findings in run_checks(checks)]
    forever.set()
    assert time.monotonic() - begin < 30
    assert found == [
        ("disk", [("fail", "gave no answer within 0.2 s")]),
        ("clock", [("warn", "gave no answer within 0.2 s")]),
        ("driver", [("fail", "could not be checked (OSError: [Errno 5] Input/output error)")]),
        ("good", [("ok", "works")]),
    ]
