"""What `kvplan doctor` answers."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from kvplan.cli import machine as doctor
from kvplan.cli import main
from kvplan.cuda.driver import loaded
from kvplan.cuda.machine import Link
from tests.commands import BLOCKED, answer, document, python
from tests.cuda.fake_system import libraries, without_nvml
from tests.cuda.peer_topologies import Topology
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


def test_its_document(capsys, sees):
    asked = sees(SLOW)
    given = document(capsys, "doctor", "--device", "cuda:1", code=1)
    assert list(given) == ["schema", "device", "healthy", "findings", "facts"]
    assert (given["schema"], given["device"], asked) == ("kvplan.doctor/3", "cuda:1", [("cuda:1", True)])
    assert given["findings"][3] == {
        "name": "link",
        "state": "problem",
        "what": "PCIe generation 5 x8 now, at most generation 5 x16",
        "advice": "reseat the card or check the BIOS slot setting: x8 of x16 halves the ceiling",
    }
    assert given["facts"]["machine"] == asdict(SLOW.machine)
    assert given["facts"]["ram"] == list(SLOW.ram)
    assert set(given["facts"]) == set(asdict(SLOW))


@pytest.mark.parametrize("installed", [True, False])
def test_nvml_tells_the_link_and_the_nvlinks(capsys, monkeypatch, installed):
    loaded.cache_clear()
    entries, nvml = libraries(monkeypatch)
    Topology(2, {gpu: ["switch"] * 18 for gpu in range(2)}).play(entries, nvml)
    nvml.gives["nvmlDeviceGetCurrPcieLinkGeneration"] = 5
    if not installed:
        without_nvml(monkeypatch)
    main(["doctor", "--json"])
    given = json.loads(capsys.readouterr().out)
    loaded.cache_clear()
    advice = {one["name"]: one["advice"] for one in given["findings"]}
    assert [one["nvlinks"] for one in given["facts"]["peers"]] == [18 if installed else None] * 2
    assert ("nvidia-ml-py" in given["facts"]["missing"]) != installed
    assert advice["peers"] == ("" if installed else "pip install nvidia-ml-py")
    if installed:
        assert given["facts"]["machine"]["link"] == asdict(Link(5, 16, 5, 16))
        assert given["facts"]["machine"]["driver"] == "580.159.04"
        assert advice["link"] == ""


def test_eight_gpus_are_one_line(capsys, sees):
    sees(SEVERAL_GPUS)
    lines = answer(capsys, "doctor").splitlines()
    assert "ok  peers          from every GPU to every other: by NVLink, 18 links" in lines


def test_its_document_has_the_link_of_each_pair(capsys, sees):
    sees(SEVERAL_GPUS)
    given = document(capsys, "doctor")["facts"]["peers"]
    assert [(one["gpu"], one["peer"]) for one in given] == [(a, b) for a in range(8) for b in range(8) if a != b]
    assert given[0] == {"gpu": 0, "peer": 1, "reachable": True, "why": "", "nvlinks": 18}
    sees(UNREACHABLE)
    given = document(capsys, "doctor")["facts"]["peers"]
    assert given[0] == {"gpu": 0, "peer": 1, "reachable": False, "why": "no peer access", "nvlinks": None}
    sees(HEALTHY)  # one GPU
    assert document(capsys, "doctor")["facts"]["peers"] is None


def test_the_default_device(sees):
    asked = sees(HEALTHY)
    assert main(["doctor", "--device", "cuda"]) == 0
    assert asked == [("cuda:0", True)]


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["doctor"], ["doctor", "--json"]])
def test_it_runs_on_any_machine_and_imports_nothing_large(argv):
    blocked = ["torch", "triton", "cuda", "numba"] + ["rich"] * ("--json" in argv)
    done = python("-c", BLOCKED.format(blocked=blocked, argv=argv))
    assert (done.returncode, done.stderr) == (1, "")  # without numba there is a problem, with a GPU or without
    assert "not to be had" in done.stdout


@pytest.mark.slow
def test_it_imports_no_package_that_it_asks_for():
    code = (
        "import sys; from kvplan.cli import main; main(['doctor', '--json']);"
        "print([name for name in ('torch', 'triton', 'numba') if name in sys.modules], file=sys.stderr)"
    )
    assert python("-c", code).stderr == "[]\n"


@pytest.mark.slow
def test_a_terminal_without_unicode():
    assert python("-m", "kvplan", "doctor", PYTHONIOENCODING="ascii", PYTHONUTF8="0").stdout.isascii()
