"""What nvidia-smi says: of good GPUs, of bad ones, and nothing."""

import pytest

from tests.doctor.programs import program, states
from titanlab.doctor import software
from titanlab.doctor.software import check_gpus

ROW = "{}, NVIDIA H100 80GB HBM3, 570.86.15, {}, 81559, {}"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(0, 4, 0), (1, 4, "[N/A]")], {"GPUs": "ok"}),
        ([(0, 70000, 0)], {"GPUs": "ok", "GPU memory": "warn"}),
        ([(0, 4, 12)], {"GPUs": "ok", "GPU memory errors": "fail"}),
        ([], {"GPUs": "fail"}),
    ],
)
def test_what_nvidia_smi_says(tmp_path, monkeypatch, rows, expected):
    (tmp_path / "rows").write_text("".join(ROW.format(*row) + "\n" for row in rows) or "NVIDIA-SMI has failed\n")
    program(tmp_path, "nvidia-smi", f"cat {tmp_path}/rows")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert states(check_gpus()) == expected


def test_a_driver_that_hangs(tmp_path, monkeypatch):
    program(tmp_path, "nvidia-smi", "exec sleep 30")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(software, "_SECONDS", 0.2)
    (finding,) = check_gpus()
    assert (finding.state, finding.text) == ("fail", "nvidia-smi gave no answer within 0.2 s")


def test_a_machine_without_gpus(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert states(check_gpus()) == {"GPUs": "ok"}
