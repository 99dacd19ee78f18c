"""What `kvplan doctor` answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplan.cli import machine as doctor
from tests.commands import BLOCKED, answer, document, python
from tests.measure.doctor_facts import GPU_LESS, HEALTHY, SEVERAL_GPUS, SLOW, UNREACHABLE

GOLDEN = """\
ok       driver         CUDA 13.0, driver 580.159.04
ok       GPU            cuda:0: NVIDIA H100 80GB HBM3 at 0000:0f:00.0
ok       batch copies   cuMemcpyBatchAsync is there
problem  link           PCIe generation 5 x8 now, at most generation 5 x16
                        reseat the card or check the BIOS slot setting: x8 of
                        x16 halves the ceiling
ok       NUMA           the GPU is on node 1, this process may run on node 1
                        alone
ok       connections    CUDA_DEVICE_MAX_CONNECTIONS=32
ok       IOMMU          identity: nothing is translated
ok       profile        calibrated: NVIDIA H100, PCIe 5 x16
ok       torch          2.11.0+cu130, built for CUDA 13.0
ok       Triton         3.6.0
ok       numba          0.68.0, keeps loops in /home/me/.cache/numba
warning  locked memory  at most 8 MiB: CUDA pins more all the same, RDMA (UCX,
                        NIXL) does not
                        ulimit -l unlimited, or docker run --ulimit memlock=-1
ok       host memory    400 GiB of 512 GiB available
"""


@pytest.fixture
def sees(monkeypatch):
    """``sees(facts)``: the machine is as these facts say; gives what is asked of it."""
    asked = []

    def seeing(facts):
        def gather(device, *, busy):
            asked.append((device, busy))
            return replace(facts, device=device)

        monkeypatch.setattr(doctor, "gather", gather)
        return asked

    return seeing


def test_it_reads_well_at_80_columns(capsys, sees):
    asked = sees(SLOW)
    text = answer(capsys, "doctor", code=1)
    assert text == GOLDEN
    assert max(map(len, text.splitlines())) <= 80
    assert asked == [("cuda:0", True)]


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        (HEALTHY, 0),
        (replace(HEALTHY, locked=65536), 0),  # a warning
        (replace(HEALTHY, ram=None), 0),  # unknown
        (SEVERAL_GPUS, 0),
        (UNREACHABLE, 0),  # a warning
        (SLOW, 1),
        (GPU_LESS, 1),
    ],
)
def test_a_problem_is_a_finding(capsys, sees, facts, code):
    sees(facts)
    assert ("problem" in answer(capsys, "doctor", code=code)) == bool(code)
    given = document(capsys, "doctor", code=code)
    assert given["healthy"] == (code == 0)


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["doctor"], ["doctor", "--json"]])
def test_it_runs_on_any_machine_and_imports_nothing_large(argv):
    blocked = ["torch", "triton", "cuda", "numba"] + ["rich"] * ("--json" in argv)
    done = python("-c", BLOCKED.format(blocked=blocked, argv=argv))
    assert (done.returncode, done.stderr) == (1, "")  # without numba there is a problem, with a GPU or without
    assert "not to be had" in done.stdout
