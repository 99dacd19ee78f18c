"""A submit counts a plan and splits its layers once; one file writes a transfer's state; paths keep the Protocol."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import kvplan
from kvplan.cost import statistics
from kvplan.cost.profile import default_pair
from kvplan.execute.gpu import backend, device_transfer, path, selection
from kvplan.plan.halves import halves_of
from tests.paged_caches import DEVICE_NOTATION, Paged
from tests.simulated import Device
from tests.simulated.executors import MOVE, OnDevice, both_ways, every_path, executor_on, favouring, pair_on
from tests.simulated.executors import PATHS as NAMED
from tests.simulated.hybrid import Hybrid
from tests.simulated.toy_path import ToyPath

GPU = Path(backend.__file__).parent


@both_ways
@pytest.mark.parametrize("taken", NAMED)
def test_a_submit_that_auto_decides_counts_its_plan_once(direction, taken):
    device = Device()
    layer_first = Paged("layer block kv token head dim", dim=96), OnDevice("layer block kv token head dim", dim=96)
    pair = pair_on(device, direction, layer_first[1], layer_first[0])
    plan = pair.plan(MOVE)
    with (
        executor_on(device, profile=favouring(taken)) as executor,
        mock.patch.object(selection, "counted", wraps=selection.counted) as counting,
        mock.patch.object(statistics, "chains", wraps=statistics.chains) as chaining,
        mock.patch.object(statistics, "follow", wraps=statistics.follow) as following,
    ):
        assert executor.submit(plan).result().path == taken
    sizes = [size for part in plan.parts for size in part.group.sizes]
    assert counting.call_count == 1
    assert 0 < chaining.call_count <= len(sizes), "each size of copies is counted once"
    assert following.call_count <= len(plan.parts)
    pair.check()


def test_the_halves_of_a_plan_are_not_counted_again():
    hybrid = Hybrid(Device(), "load")
    plan = hybrid.plan(range(3), range(3))
    counts = statistics.counted(plan)
    with mock.patch.object(statistics, "chains") as chaining:
        made = statistics.halves_statistics(plan.direction, counts)
    assert not chaining.call_count
    assert made == tuple(statistics.statistics_of(half) for half in halves_of(plan))


@every_path
@both_ways
def test_a_submit_by_layers_splits_its_layers_once(path, direction):
    device = Device()
    pair = pair_on(device, direction)
    splits = mock.patch.object(device_transfer, "split_layers", wraps=device_transfer.split_layers)
    with executor_on(device, path) as executor, splits as splitting:
        executor.submit(pair.plan(MOVE), by_layer=True).synchronize()
    assert splitting.call_count == 1
    pair.check()
    users = {file.name for file in GPU.glob("*.py") if "split_layers" in file.read_text()}
    assert users == {"device_transfer.py", "warmup.py"}


def assigned(tree: ast.AST) -> list[tuple[str, ast.Attribute]]:
    """All attributes that some code assigns, deletes or adds to, by their names."""
    return [
        (node.attr, node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
    ]


def on_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


@pytest.mark.parametrize(
    ("file", "name", "known"),
    [
        ("gpu/device_transfer.py", "DeviceTransfer", {"plan", "captures", "launches", "_end", "_over", "_error"}),
        ("host/host_transfer.py", "HostTransfer", {"plan", "after", "behind", "fates", "_over", "_error"}),
    ],
)
def test_one_file_writes_the_state_of_a_transfer(file, name, known):
    """Elsewhere, only classes that are no such transfer assign such names, and only on ``self``."""
    home = GPU.parent / file
    kind = next(
        node for node in ast.parse(home.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    state = {attribute for attribute, node in assigned(kind) if on_self(node)}
    assert known <= state
    for other in sorted(Path(kvplan.__file__).parent.rglob("*.py")):
        if other == home:
            continue
        tree = ast.parse(other.read_text())
        heirs = [
            node for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and name in map(ast.unparse, node.bases)
        ]  # fmt: skip
        inherited = {id(node) for heir in heirs for _, node in assigned(heir)}
        for attribute, node in assigned(tree):
            own = on_self(node) and id(node) not in inherited
            assert own or attribute not in state, f"{other}:{node.lineno} assigns {attribute}"


@pytest.mark.parametrize("kind", [*backend.PATHS, ToyPath])
def test_every_path_keeps_the_protocol(kind):
    """It defines what it must, and has no public member that another file would have to know, but its plan's cost."""
    required = {"prepare", "write"}
    public = {name for name in (*vars(path.Path), *path.Path.__annotations__) if not name.startswith("_")}
    assert required <= vars(kind).keys()
    assert isinstance(kind.name, str)
    assert path.Path in kind.__mro__
    more = {name for name in vars(kind) if not name.startswith("_")} - public
    assert more <= {"replan"}, "the executor knows the Protocol alone"


def test_a_new_path_is_one_name_in_one_list():
    device = Device()
    with executor_on(device, "toy") as executor:
        assert list(executor._backend.paths) == [kind.name for kind in (*backend.PATHS, ToyPath)]


def test_the_merges_of_scattered_units_are_counted_once():
    """Law 8: a sample stands for the count where its result is known; blocks that touch are still counted."""
    device, random = Device(), np.random.default_rng(0)
    pair = pair_on(device, "push", OnDevice(DEVICE_NOTATION, block=600), OnDevice(DEVICE_NOTATION, block=600))
    program, few = pair.program, default_pair()
    engine = few.costs["push"]["copy_engine"]
    cheap = {**engine.wall, "fixed": 0.0, "large_byte": 0.0, "small_byte": 0.0}
    costs = {**few.costs["push"], "copy_engine": replace(engine, wall=cheap, seconds=cheap)}
    profile = replace(few, costs={**few.costs, "push": costs})
    with (
        executor_on(device, profile=profile) as executor,
        mock.patch.object(selection, "counted", wraps=selection.counted) as counting,
    ):
        choose = executor._backend.selection.choose
        for _ in range(5):
            blocks = (random.permutation(600)[:500] for _ in range(2))
            assert choose(program.plan(*blocks), capturing=False).path.name == "kernel"
        assert counting.call_count == 1
        assert choose(program.plan(range(500), range(100, 600)), capturing=False).path.name == "copy_engine"
        assert counting.call_count == 2
