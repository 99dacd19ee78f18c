"""What the cost model makes of a plan's numbers, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvplan import PathError, Policy
from kvplan.cost.model import (
    COMPUTE_WEIGHT,
    TIE,
    Candidate,
    candidates,
    features,
    predict,
)
from kvplan.cost.policy import PEER_ROUTES, ROUTES
from kvplan.cost.profile import (
    GPU_ROUTES,
    TERMS,
    Beside,
    DeviceProfile,
    PathCosts,
    ceiling_names,
    default_programs,
    route_paths,
)
from kvplan.cost.statistics import Pieces, Statistics
from tests.cost.priced_profiles import PLAN, profile


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("kernel", (1, 100, 1_000_000)),
        ("copy_engine", (1, 40, 200_000, 10, 800_000)),
        ("copy_engine_2d", (1, 5 + 20, 80 + 20, 1_000_000)),
        ("staged", (1, 100, 4, 50_000, 6, 950_000)),
    ],
)
def test_how_often_each_term_counts(path, counts):
    assert features(path, PLAN) == counts
    assert len(counts) == len(TERMS[path])


@pytest.mark.parametrize("path", ["host", "auto", ""])
def test_a_path_without_a_model(path):
    with pytest.raises(PathError, match=f"path '{path}' has no cost model; those with one are kernel, copy_engine, "):
        features(path, PLAN)


COSTS = {
    "kernel": (5000.0, 10.0, 0.05),
    "copy_engine": (3000.0, 1000.0, 0.1, 500.0, 0.02),
    "copy_engine_2d": (4000.0, 300.0, 20.0, 0.05),
    "staged": (20_000.0, 2.0, 1000.0, 0.1, 500.0, 0.02),
}
ALONE = {
    "kernel": 56e-6,  # 5 + 100 x 0.01 + 50
    "copy_engine": 84e-6,  # 3 + 40 + 20 + 5 + 16
    "copy_engine_2d": 63.5e-6,  # 4 + 7.5 + 2 + 50
    "staged": 51.2e-6,  # 20 + 0.2 + 4 + 5 + 3 + 19
}


@pytest.mark.parametrize("path", TERMS)
def test_a_prediction_by_hand(path):
    made = predict(path, PLAN, profile(COSTS), Policy())
    # The kernel's 8 programs are 8 SMs of 100; staging reads and writes a megabyte of memory of 400 GB/s: 5 us.
    share = {"kernel": 0.08, "staged": 5 / 51.2}.get(path, 0.0)
    wanted = (ALONE[path], ALONE[path] + 1e-6, 0.5e-6, share)
    assert (made.seconds, made.wall, made.cpu_seconds, made.sm_share) == tuple(map(near, wanted))
    assert (made.path, made.compute_seconds, made.refused, made.score) == (path, 0.0, "", made.wall)


@pytest.mark.parametrize(
    ("direction", "programs", "seconds"),
    [
        ("load", None, 56e-6),
        ("load", 8, 56e-6),  # what was measured
        ("load", 4, 52e-6),
        ("load", 1, 52e-6),  # 2, and a megabyte at 20 GB/s; the program itself takes 100 x 40 ns + 40 us
        ("load", 2, 52e-6),
        ("load", 400, 52e-6),
        ("store", None, 56e-6),
        ("store", 8, 56e-6),
        ("store", 2, 202e-6),
        ("store", 1, 202e-6),  # 5 GB/s
    ],
)
def test_programs_share_the_work_until_the_link_is_full(direction, programs, seconds):
    made = predict("kernel", replace(PLAN, route=direction), profile(COSTS), Policy(max_programs=programs))
    assert (made.seconds, made.wall) == (near(seconds), near(seconds + 1e-6))
    share = min((programs or 8) / 100, 1.0)
    assert made.sm_share == near(share)


def test_one_program_takes_its_time():
    slow = replace(PLAN, runs=10_000)
    made = [predict("kernel", slow, profile(COSTS), Policy(max_programs=count)).seconds for count in (1, 2, 4)]
    assert made == [near(442e-6), near(222e-6), near(112e-6)]  # 2 + (400 + 40) / count


@pytest.mark.parametrize(
    ("alignment", "programs", "seconds"),
    [
        (16, None, 56e-6),
        (8, None, 56e-6),  # a million bytes in words of 8: 5 us for eight programs of 3 words a nanosecond
        (1, None, 56e-6),
        (1, 4, 1e-3 / 12),
        (4, 2, 52e-6),  # 42, and the link is slower
        (4, 1, 1e-3 / 12),
        (2, 1, 1e-3 / 6),
        (2, 100, 52e-6),
    ],
)
def test_narrow_words_make_a_program_move_less(alignment, programs, seconds):
    made = predict("kernel", replace(PLAN, alignment=alignment), profile(COSTS), Policy(max_programs=programs))
    assert (made.seconds, made.wall) == (near(seconds), near(seconds + 1e-6))


def test_groups_beyond_the_first_cost_the_cpu_of_the_kernel_path():
    one, three = (predict("kernel", replace(PLAN, groups=count), profile(COSTS), Policy()) for count in (1, 3))
    assert three.seconds == one.seconds
    assert [three.wall - one.wall, three.cpu_seconds - one.cpu_seconds] == [near(6e-6)] * 2
    others = [predict(path, replace(PLAN, groups=3), profile(COSTS), Policy()) for path in TERMS if path != "kernel"]
    assert others == [predict(path, PLAN, profile(COSTS), Policy()) for path in TERMS if path != "kernel"]


def test_few_programs_scatter_a_ring_slowly():
    some = profile(COSTS)
    within = 2 * PLAN.nbytes / some.ceilings["memory"] * 1e-9  # seconds that all SMs take within the GPU
    one = predict("staged", PLAN, some, Policy(max_programs=1))
    assert one.seconds == near(within * some.multiprocessors)
    most = predict("staged", PLAN, some, Policy(max_programs=some.multiprocessors))
    assert most == predict("staged", PLAN, some, Policy())


def test_beside_compute_a_transfer_is_slower_and_compute_loses():
    made = predict("kernel", PLAN, profile(COSTS, {"kernel": Beside(0.5, 1.25)}), Policy(overlap="decode"))
    assert made.seconds == near(52e-6)  # of 4 programs, alone
    assert made.wall == near(105e-6)  # twice 52, and 1
    assert made.compute_seconds == near(20.8e-6)  # a fifth of 104: 1 - 1 / 1.25
    assert made.score == near(105e-6 + 4 * 20.8e-6)
    assert COMPUTE_WEIGHT == 4


def test_fewer_programs_cost_compute_less():
    some = profile(COSTS, {"kernel": Beside(1.0, 1.2)})
    lost = [predict("kernel", PLAN, some, Policy(overlap="prefill", max_programs=count)) for count in (2, 4, 8)]
    assert [one.compute_seconds / one.seconds for one in lost] == [near(1 - 1 / slow) for slow in (1.1, 1.2, 1.4)]


def test_a_path_that_compute_suffers_from_loses_though_it_is_faster_alone():
    beside = {"staged": Beside(0.9, 1.5), "copy_engine_2d": Beside(0.95, 1.01)}
    some = profile({path: COSTS[path] for path in beside}, beside)
    order = {overlap: [one.path for one in candidates(PLAN, some, Policy(overlap=overlap), {"kernel": "no"})[:2]]
             for overlap in ("idle", "decode")}  # fmt: skip
    assert order == {"idle": ["staged", "copy_engine_2d"], "decode": ["copy_engine_2d", "staged"]}


def test_decode_and_prefill_are_asked_apart():
    some = profile(COSTS)
    worse = dict.fromkeys(GPU_ROUTES, dict.fromkeys(TERMS, Beside(0.5, 2.0)))
    some = replace(some, beside={"decode": some.beside["decode"], "prefill": worse})
    assert predict("kernel", PLAN, some, Policy(overlap="decode")).compute_seconds == 0
    assert predict("kernel", PLAN, some, Policy(overlap="prefill")).compute_seconds == near(52e-6)


def constant(**fixed: float) -> DeviceProfile:
    """Paths that cost so many microseconds by the clock, whatever is moved."""
    return profile({path: (us * 1e3 - 1e3,) + (0.0,) * (len(TERMS[path]) - 1) for path, us in fixed.items()})


def test_the_cheapest_is_first_and_the_rest_follow():
    made = candidates(PLAN, constant(kernel=40, copy_engine=10, copy_engine_2d=30, staged=20), Policy())
    assert [one.path for one in made] == ["copy_engine", "staged", "copy_engine_2d", "kernel"]
    assert [one.score for one in made] == [near(us * 1e-6) for us in (10, 20, 30, 40)]


def test_what_cannot_serve_is_last_with_its_reason():
    refused = {"kernel": "not pinned", "staged": "too large"}
    made = candidates(PLAN, profile(COSTS), Policy(), refused)
    assert [one.path for one in made] == ["copy_engine_2d", "copy_engine", "kernel", "staged"]
    assert made[2:] == [Candidate("kernel", refused="not pinned"), Candidate("staged", refused="too large")]
    assert not any(one.refused for one in made[:2])
    every = dict.fromkeys(TERMS, "no")
    assert candidates(PLAN, profile(COSTS), Policy(), every) == [Candidate(path, refused="no") for path in TERMS]


COST = st.floats(0, 1e6)
COUNT = st.integers(0, 10**7)
ALIGNMENT = st.sampled_from((1, 2, 4, 8, 16))
POLICIES = st.builds(
    Policy, overlap=st.sampled_from(("idle", "decode", "prefill")), max_programs=st.none() | st.integers(1, 200)
)


@st.composite
def drawn(draw) -> DeviceProfile:
    """Costs of all routes: of a GPU and of a pair at once."""
    path_costs = {path: PathCosts(*(dict(zip(terms, draw(st.tuples(*[COST] * len(terms))), strict=True))
                                    for _ in range(4))) for path, terms in TERMS.items()}  # fmt: skip
    beside = {path: draw(st.builds(Beside, st.floats(0.1, 1), st.floats(1, 3))) for path in TERMS}
    made = profile({}, beside)
    # What takes longer alone takes longer by the clock, too: the events are within what the clock sees.
    for path, one in path_costs.items():
        wall = {term: one.seconds[term] + one.wall[term] for term in TERMS[path]}
        path_costs[path] = PathCosts(one.seconds, wall, one.cpu, one.program)
    pair = dict.fromkeys(ceiling_names(PEER_ROUTES), 7.0)
    return replace(
        made,
        costs={route: {path: path_costs[path] for path in route_paths(route)} for route in ROUTES},
        ceilings={**made.ceilings, **pair},
        beside={kind: dict.fromkeys(ROUTES, beside) for kind in made.beside},
        programs=default_programs(ROUTES, made.multiprocessors),
    )


@st.composite
def statistics(draw) -> Statistics:
    copies, rowless, extents = (draw(st.builds(Pieces, COUNT, COUNT, COUNT, COUNT)) for _ in range(3))
    return Statistics(
        draw(st.sampled_from(ROUTES)), draw(COUNT), draw(st.integers(1, 9)), draw(COUNT), draw(ALIGNMENT), copies,
        draw(COUNT), draw(COUNT), rowless, extents, 4096,
    )  # fmt: skip


def more(one: Statistics, other: Statistics) -> Statistics:
    """A plan with at least as much of everything, and no better aligned."""
    return Statistics(
        one.route, one.nbytes + other.nbytes, one.groups + other.groups, one.runs + other.runs,
        min(one.alignment, other.alignment), one.copies.plus(other.copies), one.calls + other.calls,
        one.rows + other.rows, one.rowless.plus(other.rowless), one.extents.plus(other.extents), 4096,
    )  # fmt: skip


@given(some=drawn(), one=statistics(), other=statistics(), policy=POLICIES, path=st.sampled_from(sorted(TERMS)))
def test_more_is_never_faster(some, one, other, policy, path):
    assume(path in route_paths(one.route))
    less, much = predict(path, one, some, policy), predict(path, more(one, other), some, policy)
    slack = 1 + 1e-9
    assert less.seconds <= much.seconds * slack + 1e-15
    assert less.wall <= much.wall * slack + 1e-12
    assert less.cpu_seconds <= much.cpu_seconds * slack + 1e-12
    assert less.score <= much.score * slack + 1e-12


@given(some=drawn(), plan=statistics(), policy=POLICIES, refused=st.sets(st.sampled_from(sorted(TERMS))))
def test_the_first_is_within_the_tie_of_all_and_all_are_there(some, plan, policy, refused):
    made = candidates(plan, some, policy, dict.fromkeys(refused, "no"))
    assert {one.path for one in made} == {*route_paths(plan.route), *refused}
    able = [one for one in made if not one.refused]
    assert [bool(one.refused) for one in made] == [False] * len(able) + [True] * len(refused)
    assume(able)
    assert able[0].score <= min(one.score for one in able) * (1 + TIE)
    assert [one.score for one in able[1:]] == sorted(one.score for one in able[1:])
    for one in able:
        assert min(one.seconds, one.wall, one.cpu_seconds, one.compute_seconds) >= 0
        assert one.cpu_seconds <= one.wall or policy.overlap != "idle"
        assert 0 <= one.sm_share <= 1
