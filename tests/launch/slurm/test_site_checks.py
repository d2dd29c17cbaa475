"""What Slurm says of itself: a site that is fine, sites that are set up otherwise, one that hangs, one that babbles."""

import pytest

from tests.doctor.programs import program, states
from titanlab.launch.launchers_schema import Slurm
from titanlab.launch.slurm import site as site_checks
from titanlab.launch.slurm.site import check_settings, check_slurm

PARTITIONS = "gpu* 4 up 2-00:00:00 64 gpu:h100:8\ngpu* 1 up 2-00:00:00 64 gpu:h100:8\nlow 16 down infinite 64 (null)\n"
SETTINGS = """\
Configuration data as of 2026-11-24T12:00:00
AccountingStorageType   = accounting_storage/slurmdbd
JobRequeue              = 1
KillWait                = 30 sec
MaxArraySize            = 1001
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
PowerPlugin             =
SLURM_VERSION           = 24.05.4
"""
GOOD = {
    "partitions": "ok",
    "devices of nodes": "ok",
    "submission": "ok",
    "version": "ok",
    "requeue": "ok",
    "preemption": "ok",
    "accounting": "ok",
    "arrays": "ok",
}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Slurm's commands; those that are named do something else."""

    def made(**scripts):
        folder = tmp_path / "bin"
        (tmp_path / "partitions").write_text(PARTITIONS)
        (tmp_path / "settings").write_text(SETTINGS)
        usual = {
            "sinfo": f"cat {tmp_path}/partitions",
            "scontrol": f"cat {tmp_path}/settings",
            "sbatch": f'echo "$@" > {tmp_path}/sbatch.words\n'
            "echo 'sbatch: Job 7 to start at 2026-11-24T12:30:00 using 1 processors on nodes n1' >&2",
        }
        for name in site_checks._SITE_COMMANDS:
            program(folder, name, scripts.get(name, usual.get(name, "true")))
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        monkeypatch.delenv("SLURM_CONF", raising=False)
        return tmp_path

    return made


def test_a_site_that_is_fine(site):
    folder = site()
    found = list(check_slurm(Slurm(partition="gpu", account="me", minutes=60)))
    assert states(found) == GOOD
    texts = {each.name: each.text for each in found}
    assert texts["partitions"] == "gpu (5), low (16); jobs go to gpu"
    assert texts["submission"] == "a job of one task could start at 2026-11-24T12:30:00"
    words = (folder / "sbatch.words").read_text().split()
    assert words[0] == "--test-only"
    assert {"--partition=gpu", "--account=me", "--time=60", "--wrap=true"} <= {*words}


def test_a_setting_without_a_value_does_not_take_the_next_line(site, monkeypatch):
    site(scontrol="printf 'PreemptParameters       = \\nPreemptMode = REQUEUE\\nPreemptType = preempt/qos\\n'")
    texts = {each.name: each.text for each in check_slurm(Slurm(partition="gpu"))}
    assert texts["preemption"].startswith("qos, mode REQUEUE: a run saves, and goes back into the queue")


def test_a_host_without_slurm_is_no_fault_and_one_with_half_of_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert states(check_slurm(Slurm())) == {"Slurm": "ok"}
    program(tmp_path, "sinfo", "true")
    (finding,) = check_slurm(Slurm())
    assert finding.state == "fail"
    assert finding.text.startswith("lacks sbatch, srun, ")


@pytest.mark.parametrize(
    ("scripts", "config", "expected"),
    [
        ({"sinfo": "echo 'slurm_load_partitions: Unable to contact' >&2; exit 1"}, {}, {"Slurm": "fail"}),
        ({"sinfo": r"printf '\377\200 \001\n\000garbage\n'"}, {}, {"partitions": "fail"}),
        ({"sinfo": "true"}, {}, {"partitions": "fail"}),
        ({}, {"partition": "none"}, {"partitions": "fail"}),
        ({}, {"partition": "low"}, {"partitions": "fail"}),
        ({}, {"partition": "gpu", "minutes": 2881}, {"submission": "fail"}),
        ({}, {"partition": "gpu", "cpus_per_task": 99}, {"submission": "fail"}),
        ({"sinfo": "echo 'low 16 up infinite 8 (null)'"}, {}, {"partitions": "warn"}),
        ({"sbatch": "echo 'sbatch: error: Invalid account' >&2; exit 1"}, {}, {"submission": "fail"}),
        ({"scontrol": "exit 1"}, {}, {"settings": "warn"}),
        ({"scontrol": "echo garbage = = ="}, {}, {"accounting": "warn"}),
        ({"sacct": "echo 'sacct: error: slurmdbd: Connection refused' >&2; exit 1"}, {}, {"accounting": "warn"}),
    ],
)
def test_a_site_that_lacks_something(site, scripts, config, expected):
    site(**scripts)
    found = states(check_slurm(Slurm(**config)))
    assert {name: found.get(name) for name in expected} == expected


def test_commands_that_hang(site, monkeypatch):
    monkeypatch.setattr(site_checks, "_SITE_SECONDS", 0.2)
    site(sinfo="exec sleep 30")
    (finding,) = check_slurm(Slurm())
    assert (finding.state, finding.text) == ("fail", "sinfo gave no answer within 0.2 s")


@pytest.mark.parametrize(
    ("settings", "config", "expected"),
    [
        ({"JobRequeue": "0"}, {}, {"requeue": "ok"}),
        ({"JobRequeue": "1"}, {"requeue": False}, {"requeue": "warn"}),
        ({"PreemptType": "preempt/qos", "PreemptMode": "SUSPEND,GANG"}, {}, {"preemption": "warn"}),
        ({"PreemptType": "preempt/none", "PreemptMode": "OFF"}, {}, {"preemption": "ok"}),
        ({"AccountingStorageType": "(null)"}, {}, {"accounting": "warn"}),
        ({"MaxArraySize": "0"}, {}, {"arrays": "fail"}),
        ({"KillWait": "300 sec"}, {}, {"time to save": "warn"}),
    ],
)
def test_settings(settings, config, expected, monkeypatch):
    monkeypatch.setenv("PATH", "")
    found = states(check_settings(settings, Slurm(**config)))
    assert {name: found.get(name) for name in expected} == expected
