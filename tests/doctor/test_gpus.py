"""What nvidia-smi says: of good GPUs, of bad ones, and nothing."""

import pytest

from tests.doctor.programs import program, states
from titanlab.doctor import software
from titanlab.doctor.software import check_gpus, links_of

ROW = "{}, NVIDIA H100 80GB HBM3, 570.86.15, {}, 81559, {}"
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tSYS\t0-47\t0\t\tN/A
GPU2\tSYS\tNV18\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPXB\tSYS\tSYS\t X

Legend:
  X    = Self
"""


def test_the_links_of_all_pairs():
    assert links_of(TOPOLOGY) == ["NV18", "SYS", "NV18"]
    assert links_of("garbage\nGPU0\nGPU1 X") == []


@pytest.mark.parametrize(
    ("rows", "topology", "expected"),
    [
        ([(0, 4, 0)], "", {"GPUs": "ok"}),
        ([(0, 4, "[N/A]"), (1, 4, 0)], TOPOLOGY.replace("SYS", "NV18"), {"GPUs": "ok", "links": "ok"}),
        ([(0, 4, 0), (1, 4, 0)], TOPOLOGY, {"GPUs": "ok", "links": "warn"}),
        ([(0, 4, 0), (1, 4, 0)], "garbage", {"GPUs": "ok", "links": "warn"}),
        ([(0, 70000, 0)], "", {"GPUs": "ok", "GPU memory": "warn"}),
        ([(0, 4, 12)], "", {"GPUs": "ok", "GPU memory errors": "fail"}),
        ([], "", {"GPUs": "fail"}),
    ],
)
def test_what_nvidia_smi_says(tmp_path, monkeypatch, rows, topology, expected):
    (tmp_path / "rows").write_text("".join(ROW.format(*row) + "\n" for row in rows) or "NVIDIA-SMI has failed\n")
    (tmp_path / "topology").write_text(topology)
    program(tmp_path, "nvidia-smi", f'if [ "$1" = topo ]; then cat {tmp_path}/topology; else cat {tmp_path}/rows; fi')
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
