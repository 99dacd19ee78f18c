"""Mutants: small changes that break kvplan, each of which tests of tests/laws or tests/contract must find.

Run with `python -m tests.deep.mutants [--room ROOM | --only NUMBER ... | --list]`. Each mutant is made in a temporary
copy of the tree. Every mutant would move wrong bytes, lose a wait, leak, or hang.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PATIENCE = 150  # seconds: a mutant that takes longer hangs
FOUND = ("failed", "hangs", "crashes")
NEAR = {"cuda": "execute", "nixl": "agents", "ranks": "program"}  # small rooms, and the rooms that they count to


class Mutant(NamedTuple):
    """One text of one file, the text that replaces it, and tests, quoted as in a shell, of which one must fail.

    A test is a file below `tests`, or the name of a test that stands in one file of them, perhaps with its parameters;
    with parameters alone, it is a refusal.
    """

    file: str
    text: str
    mutated: str
    tests: str

    @property
    def room(self) -> str:
        """The room that it belongs to."""
        folder = self.file.partition("/")[0]
        return NEAR.get(folder, folder)

    @property
    def paths(self) -> list[str]:
        """Its tests, as pytest is given them; those of no such name as they are."""
        words = [f"{REFUSAL}{word}" if word.startswith("[") else word for word in shlex.split(self.tests)]
        return [f"{HOMES[name]}::{word}" if (name := word.partition("[")[0]) in HOMES else word for word in words]


REFUSAL = "test_a_refusal_says_what_is_wrong"
HOMES = {
    name: str(file.relative_to(ROOT / "tests"))
    for folder in ("laws", "contract")
    for file in (ROOT / "tests" / folder).rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
}

# Tests that find several mutants.
COPYING = "test_executing_copies_by_coordinates_and_touches_nothing_else"
UNITS = "laws/test_staged_units.py"
RANKS = "laws/test_ranks.py"
BYTES = "contract/gpu/test_bytes.py"
ORDER = "contract/gpu/test_order.py"
LOOPS = "laws/test_planner_loops.py"
RINGS = "contract/gpu/test_ring.py"
JOINED = "test_joined_plans_are_one_transfer"
MEETINGS = "test_two_hundred_meetings[1-200-shm]"
ARRIVES = "test_every_byte_arrives_and_no_other_changes"
FUSED = "test_k_and_v_that_one_side_fuses_are_copied_half_by_half"
FAILS = "test_a_call_that_fails_is_the_error_of_its_transfer_and_of_no_other"
MANY = "test_many_submits_take_no_more_memory_than_the_first"
CALLS = "test_a_transfer_whose_calls_are_still_being_made_is_waited_for"
ERRORS = "contract/gpu/test_errors.py"
WRITES = "contract/peers/test_failed_writes.py"
LMCACHE = "contract/engines/test_lmcache.py"
SGLANG = "contract/engines/test_sglang_in_place.py"
SHORT = "test_a_short_transfer_does_not_overtake_the_calls_of_a_long_one"

# File, text, the text that replaces it, and tests that find it.
ROWS = [
    # Strides and slices; overlap and bounds; what a layout stands for.
    ("layout/strides.py", "coordinate, digit = divmod(coordinate, count)", "digit = coordinate % count", COPYING),
    ("layout/strides.py", "left.append((count // at, stride * at))", "left.append((count // at, stride))", RANKS),
    ("layout/strides.py", "inner[0] * inner[1] and outer[2] == inner[0] * inner[2]", "inner[0] * inner[1]", COPYING),
    ("layout/slicing.py", "c.address + shift, form", "c.address, form", RANKS),
    ("layout/slicing.py", "offset(turns[1], part)", "offset(turns[1], 0)", RANKS),
    ("layout/build.py", "len(steps) != 1 or min(", "not steps or min(", "test_blocks_that_are_tensors_of_their_own"),
    ("layout/disjoint.py", "and box.first >= reach:", "and box.first >= reach - 1:", "test_two_parts_of_one_memory"),
    ("layout/disjoint.py", "if stride <= reach:", "if stride < reach:", "test_two_coordinates_of_one_tensor"),
    ("layout/disjoint.py", "// box.factors[0][1] + 1)", "// box.factors[0][1])", "test_two_coordinates_of_one_tensor"),
    ("layout/disjoint.py", "np.maximum.accumulate(ends[order])", "starts[order]", "contract/test_overlap.py"),
    ("layout/address_ranges.py", "firsts + reach <= ends[at", "firsts <= ends[at", "test_bytes_outside_the_allocation"),
    ("layout/tensors.py", "self.ask() != self.address or len(", "len(", "'[Executor.submit: other memory now]'"),
    # The compiler's passes, and pairs of ranks.
    ("program/passes.py", "return bool((stretches - stretches[:, :1] == stretches[0]).all())", "return True", COPYING),
    ("program/passes.py", "= pair.heads.start - a.head_start if", "= 0 if", f"laws/test_copying.py {RANKS}"),
    ("program/passes.py", "pair.dst_dim, pair.nbytes].append(pair)", "0, pair.nbytes].append(pair)", FUSED),
    (
        "program/passes.py",
        "(last.src + last.nbytes, last.dst + last.nbytes) == (run.src, run.dst)",
        "last.dst + last.nbytes == run.dst",
        COPYING,
    ),
    ("program/passes.py", "steps[end - 1] == steps[at]", "steps[end - 1][1] == steps[at][1]", COPYING),
    ("program/passes.py", "src = run.src + sum(step * loop[1] for", "src = run.src + sum(step * loop[2] for", COPYING),
    ("program/matching.py", '("v", v, nbytes[0], nbytes[1])', '("v", v, 0, nbytes[1])', FUSED),
    ("program/matching.py", "start >= a.form.heads.stop:", "start > a.form.heads.start:", f"{COPYING} {RANKS}"),
    ("program/program.py", "if self.table is not None or len(self.factors) > 1", "if self.table is not None", COPYING),
    (
        "program/matching.py",
        "not agree(pair.src.dtype, pair.dst.dtype)), None)",
        "False), None)",
        "'[compile: bf16 in the source ... fp16 ... reinterpret=True]'",
    ),
    (
        "ranks/resharding.py",
        "check_disjoint((*a.components, *b.components))",
        "check_disjoint(a.components)",
        "'[reshard: destinations 0 and 1 share bytes]'",
    ),
    (
        "ranks/resharding.py",
        "= ids[1] % self._turn.ranks == self._turn.number",
        "= ids[1] % self._turn.ranks >= 0",
        RANKS,
    ),
    ("ranks/resharding.py", "if rank.cp_size > 1:\n", "if False:\n", RANKS),
    # Ids and addresses; merging and cutting; rings, layers and chunks.
    ("plan/loops_numba.py", "last, signs = num_blocks - 1, np", "last, signs = num_blocks, np", LOOPS),
    (
        "plan/loops_numba.py",
        "    for at in range(done):\n",
        "    for at in range(done - 1):\n",
        "test_rising_ids_skip_a_search_whose_result_is_known",
    ),
    ("plan/loops_numba.py", "[: (skip + count - 1) // units + 1].copy()", "[: (skip + count - 1) // units + 1]", LOOPS),
    (
        "plan/placement.py",
        "src_covers - count >= units[0]",
        "src_covers - count > units[0]",
        "'[CopyProgram.plan: 4 src ... cover 4 units ... 1 dst ... cover 3]'",
    ),
    ("plan/descriptors.py", "made.dst) | _among(bounds, made.dst + made.size)", "made.dst)", "laws/test_lowerings.py"),
    ("plan/descriptors.py", ", made[side] + made.size) -", ", made[side] + made.size - 1) -", "laws/test_lowerings.py"),
    ("plan/descriptors.py", "own = (before == after", "own = (owner[before] == owner[after]", "laws/test_lowerings.py"),
    ("plan/packing.py", "padded = -(-lengths // GRAIN) * GRAIN", "padded = lengths", UNITS),
    ("plan/packing.py", "if np.any(places != places[0] + moved[:, None]):", "if False:", UNITS),
    ("plan/plan.py", "(start[order[1:]] < end[order[:-", "(start[order[1:]] < start[order[:-", "contract/test_join.py"),
    ("plan/plan.py", ".dst + made.size, side", ".dst, side", "test_a_plan_refuses_just_what_it_both_reads_and_writes"),
    ("plan/descriptors.py", "np.concatenate(units, axis=1)", "units[0]", "contract/test_join.py"),
    ("plan/layers.py", "[group.dst_base - whole.dst_base]]", "[0]]", "laws/test_joined_plans.py"),
    (
        "plan/descriptors.py",
        "[(column[order], size) for column in (made.src, made.dst)]",
        "[(made.src, size), (made.dst[order], size)]",
        "test_nixl_lists_are_the_byte_moves_of_the_plan",
    ),
    ("plan/chunks.py", "span.units - 1) // units + 1", "span.units) // units", "test_gather_and_scatter_are_the_plan"),
    # The kernel and its items; waits, order and loans; the host's copies; exits.
    ("execute/gpu/kernel.py", "over = item >= items", "over = item > items", "test_any_header_is_carried_out"),
    ("execute/gpu/resources.py", "pieces = -(-size // each)", "pieces = size // each", ARRIVES),
    ("execute/transfer.py", "if not pair[1].writable:", "if False:", "'[Executor.submit: read-only]'"),
    ("execute/gpu/gpu_transfer.py", "else self.marks[group]", "else self.marks[0]", "contract/gpu/test_layers.py"),
    ("execute/gpu/row_loops.py", "first += count", "pass", JOINED),
    ("execute/gpu/row_loops.py", "[HEADER * opening + 8] = k - opening", "[HEADER * opening + 8] = 1", JOINED),
    (
        "execute/gpu/row_loops.py",
        "row = _put(rows, row, WAIT if copying else wait, stream, before, 0, 0, 0)",
        "pass",
        UNITS,
    ),
    ("execute/gpu/row_loops.py", "2 if granule == last else 1", "1", BYTES),
    ("execute/gpu/row_loops.py", "first = k + 1\n    return row", "first = k\n    return row", UNITS),
    ("execute/gpu/row_loops.py", "    if other != kernel:  # behind", "    if False:  # behind", UNITS),
    ("execute/gpu/paths.py", "[(number, units.shape[1]) for number", "[(0, units.shape[1]) for number", JOINED),
    ("execute/gpu/paths.py", ").address, nbytes", ").address, 0", f"'{ARRIVES}[simulated-kernel-device-many rows]'"),
    ("execute/gpu/staged.py", "users = [known() for known in self._before]", "users = []", RINGS),
    ("execute/gpu/staged.py", "(last + 1) * seams.", "seams.", "test_blocks_that_are_read_several_times_across_a_seam"),
    ("execute/gpu/staged.py", "address + normal, urgent", "address, urgent", RINGS),
    ("execute/gpu/staged.py", "skip = skips[not load] if per > 1 else 0", "skip = 0", ARRIVES),
    ("execute/gpu/paths.py", "return BATCH_NBYTES if direction ==", "return 0 if direction ==", BYTES),
    (
        "execute/gpu/lane.py",
        "self.backend.device.record(event, stream)",
        "pass",
        "test_it_reads_what_a_stream_has_written",
    ),
    (
        "execute/gpu/lane.py",
        "device.wait(stream, event)  # its owner may record it again",
        "pass",
        "test_an_event_counts_as_it_was_recorded_at_the_submit",
    ),
    ("execute/gpu/lane.py", "if self.pending or transfer.after is not None", "if transfer.after is not None", ORDER),
    ("execute/gpu/lane.py", "if last is not None and (", "if False and (", "test_order_holds_between_paths"),
    (
        "execute/gpu/lane.py",
        "                calls.append((AWAIT, 0, other.state.ctypes.data, int(other is transfer.follows)))\n",
        "                pass\n",
        CALLS,
    ),
    ("execute/gpu/lane.py", "        transfer.state[ENDED] = 1  # now", "        # now", FAILS),
    ("execute/gpu/gpu_transfer.py", "            piece.free.append(piece)\n", "            pass\n", MANY),
    ("execute/gpu/gpu_transfer.py", "self.backend.events.extend(self._events)", "pass", MANY),
    ("execute/gpu/lane.py", "[len(front) + number for number in", "[0 for number in", "contract/gpu/test_layers.py"),
    ("execute/backend.py", "self._worker.join()", "pass", "test_close_waits_for_what_was_submitted"),
    ("execute/gpu/resources.py", "self.pinned.close()", "pass", BYTES),
    ("execute/gpu/resources.py", "device.synchronize(event)", "pass", "test_every_path_moves_what_the_oracle_moves"),
    ("execute/gpu/selection.py", "[other() for other in known.others] != [*programs[1:]]", "False", ERRORS),
    ("execute/gpu/resources.py", "return free.pop()", "return free[-1]", ORDER),
    ("execute/gpu/resources.py", "range(0, block - size + 1, size)", "range(0, block, size)", RINGS),
    ("cuda/rows.py", "rows[:, 5] = np.minimum(starts + most, last) - starts", "rows[:, 5] = most", BYTES),
    ("cuda/player.py", "dst + row * dst_pitch, src", "dst, src", BYTES),
    ("cuda/player.py", ":\n            publish(at + FAILED, code)\n            return", ":\n            return", FAILS),
    ("cuda/issuer.py", "return not held or bool(held[-1][2][ENDED])", "return True", SHORT),
    ("execute/host.py", "range(0, count, step)]", "range(0, count - 1, step)]", COPYING),
    ("execute/backend.py", "at_exit(EXECUTORS, _drain_at_exit)", "pass", "contract/gpu/test_lifetimes.py"),
    # Memory of peers, notes, meetings and their ends; packed transfers; NIXL.
    (
        "layout/records.py",
        "at - first for at in there([component.address + step for step in form.table])",
        "step for step in form.table",
        "'test_a_pair[blocks of their own-push-shm]'",
    ),
    ("agents/board.py", ".popleft())", "[0]); break", "test_notes_come_in_the_order_of_the_submits[push-shm]"),
    (
        "agents/connection.py",
        "self._flying.pop(id(transfer), None)",
        "pass",
        "test_a_transfer_waits_for_its_event[push-shm]",
    ),
    ("agents/connection.py", "        self.hang_up(why)  #", "        #", MEETINGS),
    ("agents/connection.py", "guarded(place.owner.close)", "pass", "test_layouts_of_a_forgotten_peer_are_refused"),
    ("agents/sockets.py", "                os.close(fd)\n", "                pass\n", MEETINGS),
    ("agents/agent.py", "            close_all(greeted.descriptors)\n", "            pass\n", MEETINGS),
    (
        "agents/agent.py",
        "at_exit(AGENTS, _drain_at_exit)",
        "pass",
        "test_what_never_comes_is_given_up_with_an_error[agent-alone]",
    ),
    ("agents/connection.py", "guarded(transfer.cancel)", "pass", "test_a_peer_is_killed_while_a_transfer_waits[shm]"),
    ("agents/peer_transfer.py", "order.note and not self._noted", "False", "contract/peers/test_notes.py"),
    (
        "agents/packed/traffic.py",
        "moving.slots.pop(chunk) * line",
        "0 * moving.slots.pop(chunk) * line",
        "contract/engines/nixl/test_packed_law.py",
    ),
    ("agents/by_nixl/nixl_link.py", "if state == DONE:", "if state != MOVING:", WRITES),
    ("agents/by_nixl/nixl_link.py", "self._end.release(self._handle, memory=self.plan)", "pass", WRITES),
    # Slots, memory objects, pages and rows of engines.
    ("engines/shared.py", "first_stray(slots, tokens) is not None:", "slots[0] % tokens:", "test_any_slots_and_back"),
    ("engines/lmcache/objects.py", "(number * tokens + chunk.skip)", "number * tokens", "test_the_tokens_after_those"),
    ("engines/lmcache/objects.py", "if count > 1:", "if True:", "test_a_buffer_that_is_one_object_s_goes_with_it"),
    ("engines/lmcache/objects.py", "front, chunk.", "chunk.", LMCACHE),
    ("engines/lmcache/__init__.py", "addresses != self._described", "self._programs is None", LMCACHE),
    ("engines/sglang/host_transfers.py", "self._number(one) for one in wanted", "wanted", "test_one_layer_moves_alone"),
    ("engines/sglang/hicache.py", "=stream).wait(stream)", "=stream)", "test_pages_are_there_when_the_engine_says_so"),
    ("engines/sglang/hicache.py", "self._pair.wait_layer(self._load, layer_id, stream)", "pass", SGLANG),
    ("engines/transformers.py", "in (stored, tables)", "in (tables, stored)", "contract/engines/test_transformers.py"),
    ("engines/vllm/jobs.py", "chunk + (-(-(skip + size)", "chunk + (-(-size", "contract/engines/vllm/test_worker.py"),
    ("engines/nixl/descriptor_rows.py", "(np.uint64)) >=", "(np.uint64)) >", "contract/engines/nixl/test_interface.py"),
]
MUTANTS = [Mutant(*row) for row in ROWS]


ROOMS = list(dict.fromkeys(mutant.room for mutant in MUTANTS))


def stale() -> list[str]:
    """List the mutants whose text is not in its file exactly once, or whose tests are gone or no contract."""
    found = []
    for number, mutant in enumerate(MUTANTS):
        path = ROOT / "kvplan" / mutant.file
        count = path.read_text(encoding="utf-8").count(mutant.text) if path.exists() else 0
        if count != 1:
            found.append(f"{number}: {mutant.text!r} stands {count} times in {mutant.file}")
        for name in mutant.paths:
            file = name.partition("::")[0]
            if not file.startswith(("laws/", "contract/")) or not (ROOT / "tests" / file).exists():
                found.append(f"{number}: no tests/{name}")
    return found


def copy_of_the_tree(folder: Path) -> None:
    """Copy the files that git knows, links as links."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)


def outcome(folder: Path, tests: list[str], patience: float | None = PATIENCE) -> str:
    """Run tests in a copy of the tree: "passed", "failed", "hangs", "crashes", or pytest's other exit status.

    Without patience, it waits until they have ended, and lets pytest tell.
    """
    paths = [f"tests/{name}" for name in tests]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--hypothesis-seed=0", "-p", "no:cacheprovider", *paths]
    own = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "", "HYPOTHESIS_PROFILE": "mutants"}
    told = subprocess.DEVNULL if patience else None
    process = subprocess.Popen(
        command, cwd=folder, env=os.environ | own, stdout=told, stderr=told, start_new_session=True
    )
    try:
        status = process.wait(patience)
    except subprocess.TimeoutExpired:
        return "hangs"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that tests have started
        process.wait()
    if status < 0:  # a signal: copies outside all memory
        return "crashes"
    return {0: "passed", 1: "failed"}.get(status, f"exit status {status}")


def killed(mutant: Mutant, folder: Path) -> str:
    """Make a mutant in a copy of the tree, run its tests, and undo it; return what the tests did."""
    path = folder / "kvplan" / mutant.file
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace(mutant.text, mutant.mutated), encoding="utf-8")
    found = outcome(folder, mutant.paths)
    path.write_text(whole, encoding="utf-8")
    return found


def shown(mutant: Mutant) -> str:
    """Return a mutant's text in one line."""
    return " ".join(mutant.text.split())


def main() -> int:
    """Run; 0 where every mutant is found."""
    parser = argparse.ArgumentParser(prog="python -m tests.deep.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--room", choices=ROOMS, help="the mutants of one room")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="these mutants, counted from 0")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run none")
    asked = parser.parse_args()
    chosen = [k for k, mutant in enumerate(MUTANTS) if k in (asked.only or [k]) and asked.room in (None, mutant.room)]
    if asked.list:
        for number in chosen:
            print(f"{number:2} {MUTANTS[number].room:8} {MUTANTS[number].file}: {shown(MUTANTS[number])}")
        return 0
    if gone := stale():
        print("\n".join(gone), file=sys.stderr)
        return 1
    survived = 0
    with tempfile.TemporaryDirectory(prefix="kvplan-mutants-") as name:
        folder = Path(name)
        copy_of_the_tree(folder)
        begun = time.monotonic()
        named = sorted({name for number in chosen for name in MUTANTS[number].paths})
        if (whole := outcome(folder, named, None)) != "passed":
            print(f"without any mutant, the tests end with {whole!r}", file=sys.stderr)
            return 1
        print(f"the tests pass without any mutant, in {time.monotonic() - begun:.0f} s", flush=True)
        for number in chosen:
            mutant, since = MUTANTS[number], time.monotonic()
            found = killed(mutant, folder)
            survived += found not in FOUND
            took = time.monotonic() - since
            print(f"{number:2} {found:8} {took:4.0f} s  {mutant.file}: {shown(mutant)}", flush=True)
        print(f"{len(chosen) - survived} of {len(chosen)} found in {time.monotonic() - begun:.0f} s")
    return min(survived, 1)


if __name__ == "__main__":
    sys.exit(main())
