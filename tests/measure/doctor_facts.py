"""Facts of a healthy machine, as `kvplan doctor` gathers them."""

from __future__ import annotations

from dataclasses import replace

from kvplan.cuda.machine import Link, Machine
from kvplan.measure.doctor import UNLIMITED, Facts, ProfileInUse
from tests.cuda.fake_system import PCI
from tests.cuda.peer_topologies import all_pairs, linked, refused

GIB = 1 << 30


H100 = Machine("NVIDIA H100 80GB HBM3", "580.159.04", Link(5, 16, 5, 16), 13000, PCI, 1)


HEALTHY = Facts(
    cuda=13000,
    batch=True,
    machine=H100,
    packages={"torch": "2.11.0+cu130", "triton": "3.6.0", "numba": "0.68.0"},
    torch_cuda="13.0",
    numba_cache="/home/me/.cache/numba",
    locked=UNLIMITED,
    ram=(512 * GIB, 400 * GIB),
    cgroup=(UNLIMITED, GIB),
    nodes=(0, 1),
    cpu_nodes=(1,),
    memory_nodes=(0, 1),
    connections="32",
    iommu="identity",
    profile=ProfileInUse("calibrated", "NVIDIA H100, PCIe 5 x16", ""),
)


GPU_LESS = replace(HEALTHY, cuda=None, batch=None, machine=None, iommu=None, profile=None)


SEVERAL_GPUS = replace(HEALTHY, peers=all_pairs(8, linked(18)))


UNREACHABLE = replace(HEALTHY, peers=all_pairs(2, lambda gpu, peer: refused(gpu, peer, "no peer access", None)))


SLOW = replace(HEALTHY, machine=replace(H100, link=Link(5, 8, 5, 16)), busy=True, locked=8 << 20)
