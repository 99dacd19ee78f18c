"""Mutants: small changes that break kvplan, each of which tests of tests/laws or tests/contract must find.

Run with `python -m tests.deep.mutants [--room ROOM | --only NUMBER ... | --list]`. Each mutant is made in a temporary
copy of the tree. Every mutant would move wrong bytes, lose a wait, leak, or hang.
"""

from __future__ import annotations

import argparse
import contextlib
import os
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
    """One text of one file, the text that replaces it, and tests below `tests`, quoted as in a shell: one must fail."""

    file: str
    text: str
    mutated: str
    tests: str

    @property
    def room(self) -> str:
        """The room that it belongs to."""
        folder = self.file.partition("/")[0]
        return NEAR.get(folder, folder)


# Tests that find several mutants.
COPYING = "laws/test_copying.py::test_executing_copies_by_coordinates_and_touches_nothing_else"
FUSED = "laws/test_copying.py::test_k_and_v_that_one_side_fuses_are_copied_half_by_half"
ANY_PATH, EACH_LAYER, TOGETHER, JOINED = (
    f"laws/test_simulated_paths.py::{name}"
    for name in (
        "test_every_path_moves_what_the_oracle_moves", "test_each_layer_is_there_for_the_stream_that_waits_for_it",
        "test_several_transfers_of_different_caches_are_in_flight_together", "test_joined_plans_are_one_transfer",
    )
)  # fmt: skip
RISING = "laws/test_fast_paths.py::test_rising_ids_skip_a_search_whose_result_is_known"
LISTS = "laws/test_lowerings.py::test_nixl_lists_are_the_byte_moves_of_the_plan"
ALIASED = "contract/test_join.py::test_a_plan_refuses_just_what_it_both_reads_and_writes"
OVERLAP = "contract/test_overlap.py"
ORDER = "contract/gpu/test_order.py"
LAYERS = "contract/gpu/test_layers.py"
BYTES = "contract/gpu/test_bytes.py"
RINGS = "contract/gpu/test_ring.py"
ERRORS = "contract/gpu/test_errors.py"
ARRIVES = f"{BYTES}::test_every_byte_arrives_and_no_other_changes"
FORGOTTEN = "contract/peers/test_meetings.py::test_layouts_of_a_forgotten_peer_are_refused"
MEETINGS = "contract/peers/test_left.py::test_two_hundred_meetings[1-200-shm]"
ENDS = "contract/peers/test_ends.py"
LMCACHE = "contract/engines/test_lmcache.py"
SGLANG = "contract/engines/test_sglang"
VLLM = "contract/engines/vllm/test_worker.py"
TABLE = "contract/refusals/test_refusals.py::test_a_refusal_says_what_is_wrong"

MUTANTS = (
    # Strides and slices; overlap and bounds; what a layout stands for.
    Mutant(
        "layout/strides.py",
        "        coordinate, digit = divmod(coordinate, count)\n        total",
        "        digit = coordinate % count\n        total",
        COPYING,
    ),
    Mutant(
        "layout/strides.py",
        "left.append((count // at, stride * at))",
        "left.append((count // at, stride))",
        "laws/test_ranks.py",
    ),
    Mutant(
        "layout/strides.py",
        "return outer[1] == inner[0] * inner[1] and outer[2] == inner[0] * inner[2]",
        "return outer[1] == inner[0] * inner[1]",
        COPYING,
    ),
    Mutant("layout/slicing.py", "c.address + shift, form", "c.address, form", "laws/test_ranks.py"),
    Mutant("layout/slicing.py", "offset(turns[1], part)", "offset(turns[1], 0)", "laws/test_ranks.py"),
    Mutant(
        "layout/build.py",
        "len(steps) != 1 or min(steps) <= 0",
        "not steps or min(steps) <= 0",
        f"{OVERLAP}::test_blocks_that_are_tensors_of_their_own",
    ),
    Mutant(
        "layout/disjoint.py",
        "if cluster and box.first >= reach:",
        "if cluster and box.first >= reach - 1:",
        f"{OVERLAP}::test_two_parts_of_one_memory",
    ),
    Mutant(
        "layout/disjoint.py",
        "if stride <= reach:",
        "if stride < reach:",
        f"{OVERLAP}::test_two_coordinates_of_one_tensor",
    ),
    Mutant(
        "layout/disjoint.py",
        "(inside.end - inside.first - 1) // box.factors[0][1] + 1)",
        "(inside.end - inside.first - 1) // box.factors[0][1])",
        f"{OVERLAP}::test_two_coordinates_of_one_tensor",
    ),
    Mutant(
        "layout/disjoint.py",
        "meets = starts[order][1:] < np.maximum.accumulate(ends[order])[:-1]",
        "meets = starts[order][1:] < starts[order][:-1]",
        f"{OVERLAP}::test_blocks_that_are_tensors_of_their_own",
    ),
    Mutant(
        "layout/address_ranges.py",
        "(firsts + reach <= ends[at])",
        "(firsts <= ends[at])",
        f"{OVERLAP}::test_bytes_outside_the_allocation",
    ),
    Mutant(
        "layout/tensors.py",
        "self.ask() != self.address or len(self.storage)",
        "len(self.storage)",
        f'"{TABLE}[Executor.submit: other memory now]"',
    ),
    # The compiler's passes, and pairs of ranks.
    Mutant(
        "program/passes.py", "return bool((stretches - stretches[:, :1] == stretches[0]).all())", "return True", COPYING
    ),
    Mutant(
        "program/passes.py",
        "src_head = pair.heads.start - a.head_start if",
        "src_head = 0 if",
        "laws/test_copying.py laws/test_ranks.py",
    ),
    Mutant("program/passes.py", "pair.dst_dim, pair.nbytes].append(pair)", "0, pair.nbytes].append(pair)", FUSED),
    Mutant(
        "program/passes.py",
        "(last.src + last.nbytes, last.dst + last.nbytes) == (run.src, run.dst)",
        "last.dst + last.nbytes == run.dst",
        COPYING,
    ),
    Mutant(
        "program/passes.py",
        "steps[end - 1] == steps[at]",
        "steps[end - 1][1] == steps[at][1]",
        COPYING,
    ),
    Mutant(
        "program/passes.py", "src = run.src + sum(step * loop[1] for", "src = run.src + sum(step * loop[2] for", COPYING
    ),
    Mutant("program/matching.py", '("v", v, nbytes[0], nbytes[1])', '("v", v, 0, nbytes[1])', FUSED),
    Mutant(
        "program/matching.py",
        "if b.form.heads.start >= a.form.heads.stop:",
        "if b.form.heads.start > a.form.heads.start:",
        f"{COPYING} laws/test_ranks.py",
    ),
    Mutant(
        "program/program.py",
        "if self.table is not None or len(self.factors) > 1:",
        "if self.table is not None:",
        COPYING,
    ),
    Mutant(
        "program/matching.py",
        "not agree(pair.src.dtype, pair.dst.dtype)), None)",
        "False), None)",
        f'"{TABLE}[compile: bf16 in the source ... fp16 in the destination ... reinterpret=True]"',
    ),
    Mutant(
        "ranks/resharding.py",
        "check_disjoint((*a.components, *b.components))",
        "check_disjoint(a.components)",
        f'"{TABLE}[reshard: destinations 0 and 1 share bytes]"',
    ),
    Mutant(
        "ranks/resharding.py",
        "kept &= blocks[1] % self._turn.ranks == self._turn.number",
        "kept &= blocks[1] % self._turn.ranks >= 0",
        "laws/test_ranks.py",
    ),
    Mutant("ranks/resharding.py", "            kept &= rank.holds(token)\n", "", "laws/test_ranks.py"),
    # Ids and addresses; merging and cutting; rings, layers and chunks.
    Mutant(
        "plan/loops_numba.py",
        "last, signs = num_blocks - 1, np",
        "last, signs = num_blocks, np",
        "laws/test_planner_loops.py",
    ),
    Mutant("plan/loops_numba.py", "    for at in range(done):\n", "    for at in range(done - 1):\n", RISING),
    Mutant(
        "plan/loops_numba.py",
        "ids[: (skip + count - 1) // units + 1].copy()",
        "ids[: (skip + count - 1) // units + 1]",
        "laws/test_planner_loops.py",
    ),
    Mutant(
        "plan/placement.py",
        "src_covers - count >= units[0]",
        "src_covers - count > units[0]",
        f'"{TABLE}[CopyProgram.plan: 4 src ... cover 4 units ... 1 dst ... cover 3]"',
    ),
    Mutant(
        "plan/descriptors.py",
        "some = _among(bounds, made.dst) | _among(bounds, made.dst + made.size)",
        "some = _among(bounds, made.dst)",
        "laws/test_minimal_descriptors.py",
    ),
    Mutant(
        "plan/descriptors.py",
        "counts = np.searchsorted(marks, made[side] + made.size) - first",
        "counts = np.searchsorted(marks, made[side] + made.size - 1) - first",
        "laws/test_minimal_descriptors.py",
    ),
    Mutant(
        "plan/descriptors.py",
        "own = (before == after) |",
        "own = (owner[before] == owner[after]) |",
        "laws/test_minimal_descriptors.py laws/test_lowerings.py",
    ),
    Mutant("plan/packing.py", "padded = -(-lengths // GRAIN) * GRAIN", "padded = lengths", "laws/test_staged_units.py"),
    Mutant(
        "plan/packing.py", "if np.any(places != places[0] + moved[:, None]):", "if False:", "laws/test_staged_units.py"
    ),
    Mutant(
        "plan/plan.py",
        "clash = np.flatnonzero(start[order[1:]] < end[order[:-1]])",
        "clash = np.flatnonzero(start[order[1:]] < start[order[:-1]])",
        "contract/test_join.py",
    ),
    Mutant(
        "plan/plan.py",
        'last = np.searchsorted(starts, made.dst + made.size, side="left") - 1',
        'last = np.searchsorted(starts, made.dst, side="left") - 1',
        ALIASED,
    ),
    Mutant(
        "plan/descriptors.py",
        "Part(group, np.concatenate(units, axis=1))",
        "Part(group, units[0])",
        "laws/test_joined_plans.py contract/test_join.py",
    ),
    Mutant(
        "plan/layers.py",
        "[group.dst_base - whole.dst_base]]",
        "[0]]",
        "laws/test_joined_plans.py",
    ),
    Mutant(
        "plan/descriptors.py",
        "[(column[order], size) for column in (made.src, made.dst)]",
        "[(made.src, size), (made.dst[order], size)]",
        LISTS,
    ),
    Mutant(
        "plan/chunks.py",
        "(first + span.units - 1) // units + 1, first % units",
        "(first + span.units) // units, first % units",
        "laws/test_packed.py::test_gather_and_scatter_are_the_plan",
    ),
    # The kernel and its items; waits, order and loans; the host's copies; exits.
    Mutant(
        "execute/gpu/kernel.py",
        "over = item >= items",
        "over = item > items",
        "laws/test_copy_kernel.py::test_any_header_is_carried_out",
    ),
    Mutant("execute/gpu/resources.py", "pieces = -(-size // each)", "pieces = size // each", ARRIVES),
    Mutant(
        "execute/transfer.py",
        "if not pair[1].writable:",
        "if False:",
        "contract/gpu/test_errors.py::test_a_destination_that_is_read_only",
    ),
    Mutant(
        "execute/gpu/gpu_transfer.py",
        "event = self.end if group is None else self.marks[group]",
        "event = self.end if group is None else self.marks[0]",
        EACH_LAYER,
    ),
    Mutant(
        "execute/gpu/row_loops.py",
        "            first += count\n",
        "",
        JOINED,
    ),
    Mutant(
        "execute/gpu/row_loops.py",
        "words[HEADER * opening + 8] = k - opening",
        "words[HEADER * opening + 8] = 1",
        JOINED,
    ),
    Mutant(
        "execute/gpu/row_loops.py",
        "row = _put(rows, row, WAIT if copying else wait, stream, before, 0, 0, 0)",
        "pass",
        "laws/test_staged_units.py",
    ),
    Mutant(
        "execute/gpu/row_loops.py",
        "2 if granule == last else 1",
        "1",
        "laws/test_staged_units.py",
    ),
    Mutant(
        "execute/gpu/row_loops.py",
        "            first = k + 1\n    return row",
        "            first = k\n    return row",
        "laws/test_staged_units.py",
    ),
    Mutant(
        "execute/gpu/row_loops.py",
        "    if other != kernel:  # behind",
        "    if False:  # behind",
        "laws/test_staged_units.py",
    ),
    Mutant(
        "execute/gpu/paths.py",
        "[(number, units.shape[1]) for number",
        "[(0, units.shape[1]) for number",
        JOINED,
    ),
    Mutant(
        "execute/gpu/paths.py",
        "base, copied = transfer.scratch(nbytes).address, nbytes",
        "base, copied = transfer.scratch(nbytes).address, 0",
        f'"{ARRIVES}[simulated-kernel-device-many rows]"',
    ),
    Mutant("execute/gpu/staged.py", "users = [known() for known in self._before]", "users = []", RINGS),
    Mutant(
        "execute/gpu/staged.py",
        "extents += (last + 1) * seams.size",
        "extents += seams.size",
        f"{RINGS}::test_blocks_that_are_read_several_times_across_a_seam",
    ),
    Mutant("execute/gpu/staged.py", "address + normal, urgent", "address, urgent", RINGS),
    Mutant("execute/gpu/staged.py", "skip = skips[not load] if per > 1 else 0", "skip = 0", ARRIVES),
    Mutant("execute/gpu/paths.py", "return BATCH_NBYTES if direction ==", "return 0 if direction ==", BYTES),
    Mutant(
        "execute/gpu/lane.py",
        "        self.backend.device.record(event, stream)\n",
        "",
        f"{ORDER}::test_it_reads_what_a_stream_has_written",
    ),
    Mutant(
        "execute/gpu/lane.py",
        "            device.wait(stream, event)  # its owner may record it again\n",
        "",
        "contract/gpu/test_promises.py::test_an_event_counts_as_it_was_recorded_at_the_submit",
    ),
    Mutant(
        "execute/gpu/lane.py", "if self.pending or transfer.after is not None", "if transfer.after is not None", ORDER
    ),
    Mutant(
        "execute/gpu/lane.py",
        "if last is not None and (",
        "if False and (",
        f"{ORDER}::test_order_holds_between_paths",
    ),
    Mutant(
        "execute/gpu/lane.py",
        "                calls.append((AWAIT, 0, other.state.ctypes.data, int(other is transfer.follows)))\n",
        "                pass\n",
        "contract/gpu/test_promises.py::test_a_transfer_whose_calls_are_still_being_made_is_waited_for",
    ),
    Mutant(
        "execute/gpu/lane.py",
        "        transfer.state[ENDED] = 1  # now",
        "        # now",
        "contract/gpu/test_errors.py::test_a_call_that_fails_is_the_error_of_its_transfer_and_of_no_other",
    ),
    Mutant(
        "execute/gpu/gpu_transfer.py",
        "            piece.free.append(piece)\n",
        "            pass\n",
        "contract/gpu/test_promises.py::test_many_submits_take_no_more_memory_than_the_first",
    ),
    Mutant(
        "execute/gpu/gpu_transfer.py",
        "        self.backend.events.extend(self._events)\n",
        "",
        "contract/gpu/test_promises.py::test_many_submits_take_no_more_memory_than_the_first",
    ),
    Mutant(
        "execute/gpu/lane.py",
        "[len(front) + number for number in transfer.marked]",
        "[0 for number in transfer.marked]",
        LAYERS,
    ),
    Mutant(
        "execute/backend.py",
        "            self._worker.join()\n",
        "            pass\n",
        "contract/gpu/test_lifetimes.py::test_close_waits_for_what_was_submitted",
    ),
    Mutant("execute/gpu/resources.py", "            self.pinned.close()\n", "", BYTES),
    Mutant("execute/gpu/resources.py", "        device.synchronize(event)\n", "", ANY_PATH),
    Mutant("execute/gpu/selection.py", "[other() for other in known.others] != [*programs[1:]]", "False", ERRORS),
    Mutant("cuda/device.py", "return free.pop()", "return free[-1]", ORDER),
    Mutant("cuda/device.py", "range(0, block - size + 1, size)", "range(0, block, size)", RINGS),
    Mutant("cuda/rows.py", "rows[:, 5] = np.minimum(starts + most, last) - starts", "rows[:, 5] = most", BYTES),
    Mutant("cuda/player.py", "dst + row * dst_pitch, src", "dst, src", BYTES),
    Mutant(
        "cuda/player.py",
        "        if code:\n            publish(at + FAILED, code)\n            return\n",
        "        if code:\n            return\n",
        "contract/gpu/test_errors.py::test_a_call_that_fails_is_the_error_of_its_transfer_and_of_no_other",
    ),
    Mutant(
        "cuda/issuer.py",
        "return not held or bool(held[-1][2][ENDED])",
        "return True",
        "contract/gpu/test_promises.py::test_a_short_transfer_does_not_overtake_the_calls_of_a_long_one",
    ),
    Mutant("execute/host.py", "range(0, count, step)]", "range(0, count - 1, step)]", COPYING),
    Mutant(
        "execute/backend.py",
        "            at_exit(EXECUTORS, _drain_at_exit)\n",
        "",
        "contract/gpu/test_lifetimes.py::test_a_normal_exit_finishes_what_was_submitted",
    ),
    # Memory of peers, notes, meetings and their ends; packed transfers; NIXL.
    Mutant(
        "layout/records.py",
        "at - first for at in there([component.address + step for step in form.table])",
        "step for step in form.table",
        '"contract/peers/test_bytes.py::test_a_pair[blocks of their own-push-shm]"',
    ),
    Mutant(
        "agents/board.py",
        "ready.append(notes.popleft())",
        "ready.append(notes[0]); break",
        "contract/peers/test_notes.py::test_notes_come_in_the_order_of_the_submits[push-shm]",
    ),
    Mutant(
        "agents/connection.py",
        "        self._flying.pop(id(transfer), None)\n",
        "",
        "contract/peers/test_waiting.py::test_a_transfer_waits_for_its_event[push-shm]",
    ),
    Mutant("agents/connection.py", "        self.hang_up(why)  #", "        #", MEETINGS),
    Mutant("agents/connection.py", "        guarded(place.owner.close)\n", "        pass\n", FORGOTTEN),
    Mutant("agents/sockets.py", "                os.close(fd)\n", "                pass\n", MEETINGS),
    Mutant("agents/agent.py", "            close_all(greeted.descriptors)\n", "            pass\n", MEETINGS),
    Mutant(
        "agents/agent.py",
        "        at_exit(AGENTS, _drain_at_exit)\n",
        "",
        "contract/test_exits.py::test_what_never_comes_is_given_up_with_an_error[agent-alone]",
    ),
    Mutant(
        "agents/connection.py",
        "                guarded(transfer.cancel)\n",
        "                pass\n",
        f"{ENDS}::test_a_peer_is_killed_while_a_transfer_waits[shm]",
    ),
    Mutant(
        "agents/peer_transfer.py",
        "            if order.note and not self._noted:\n                self._send_note()\n",
        "            pass\n",
        "contract/peers/test_notes.py::test_notes_come_in_the_order_of_the_submits[push-shm]",
    ),
    Mutant(
        "agents/packed/traffic.py",
        "moving.slots.pop(chunk) * line",
        "0 * moving.slots.pop(chunk) * line",
        "contract/engines/nixl/test_packed_law.py",
    ),
    Mutant(
        "agents/by_nixl/nixl_link.py",
        "if state == DONE:",
        "if state != MOVING:",
        "contract/peers/test_failed_writes.py",
    ),
    Mutant(
        "agents/by_nixl/nixl_link.py",
        "self._end.release(self._handle, memory=self.plan)",
        "pass",
        "contract/peers/test_failed_writes.py",
    ),
    # Slots, memory objects, pages and rows of engines.
    Mutant(
        "engines/shared.py",
        "first_stray(slots, tokens) is not None:\n        return None",
        "slots[0] % tokens:\n        return None",
        f"{LMCACHE}::test_any_slots_and_back",
    ),
    Mutant(
        "engines/lmcache/objects.py",
        "first = (number * tokens + chunk.skip) // step",
        "first = number * tokens // step",
        f"{LMCACHE}::test_the_tokens_after_those",
    ),
    Mutant(
        "engines/lmcache/objects.py",
        "        if count > 1:\n",
        "        if True:\n",
        f"{LMCACHE}::test_a_buffer_that_is_one_object_s_goes_with_it",
    ),
    Mutant(
        "engines/lmcache/objects.py",
        "storage.nbytes(), front, chunk.period",
        "storage.nbytes(), chunk.period",
        f"{LMCACHE}::test_objects_of_one_buffer_that_begin_elsewhere_in_their_period",
    ),
    Mutant(
        "engines/lmcache/__init__.py",
        "if addresses != self._described:",
        "if self._programs is None:",
        f"{LMCACHE}::test_caches_that_are_handed_over",
    ),
    Mutant(
        "engines/sglang/host_transfers.py",
        "tuple(sorted(self._number(one) for one in wanted))",
        "tuple(sorted(wanted))",
        f"{SGLANG}.py::test_one_layer_moves_alone",
    ),
    Mutant(
        "engines/sglang/hicache.py",
        "self._pair.backup(host_indices, device_indices, after=stream).wait(stream)",
        "self._pair.backup(host_indices, device_indices, after=stream)",
        f"{SGLANG}_in_place.py::test_pages_are_there_when_the_engine_says_so",
    ),
    Mutant(
        "engines/sglang/hicache.py",
        "        self._pair.wait_layer(self._load, layer_id, stream)\n",
        "",
        f"{SGLANG}_in_place.py::test_pages_are_there_when_the_engine_says_so",
    ),
    Mutant(
        "engines/transformers.py",
        "for ids in (stored, tables)))",
        "for ids in (tables, stored)))",
        "contract/engines/test_transformers.py",
    ),
    Mutant(
        "engines/vllm/jobs.py",
        "end = chunk + (-(-(skip + size) // blocks_per_chunk) if size else 0)",
        "end = chunk + (-(-size // blocks_per_chunk) if size else 0)",
        VLLM,
    ),
    Mutant(
        "engines/nixl/descriptor_rows.py",
        "if np.maximum.reduce(made.view(np.uint64)) >= count:",
        "if np.maximum.reduce(made.view(np.uint64)) > count:",
        "contract/engines/nixl/test_interface.py",
    ),
)


ROOMS = list(dict.fromkeys(mutant.room for mutant in MUTANTS))


def stale() -> list[str]:
    """List the mutants whose text is not in its file exactly once, or whose tests are gone or no contract."""
    found = []
    for number, mutant in enumerate(MUTANTS):
        path = ROOT / "kvplan" / mutant.file
        count = path.read_text(encoding="utf-8").count(mutant.text) if path.exists() else 0
        if count != 1:
            found.append(f"{number}: {mutant.text!r} stands {count} times in {mutant.file}")
        for name in shlex.split(mutant.tests):
            file, _, test = name.partition("::")
            there = name.startswith(("laws/", "contract/")) and (ROOT / "tests" / file).exists()
            if not there or f"def {test.partition('[')[0]}" not in (ROOT / "tests" / file).read_text(encoding="utf-8"):
                found.append(f"{number}: no tests/{name}")
    return found


def copy_of_the_tree(folder: Path) -> None:
    """Copy the files that git knows, links as links."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)


def outcome(folder: Path, tests: str, patience: float | None = PATIENCE) -> str:
    """Run tests in a copy of the tree: "passed", "failed", "hangs", "crashes", or pytest's other exit status.

    Without patience, it waits until they have ended, and lets pytest tell.
    """
    paths = [f"tests/{name}" for name in shlex.split(tests)]
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
    found = outcome(folder, mutant.tests)
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
        named = " ".join(
            sorted({shlex.quote(name) for number in chosen for name in shlex.split(MUTANTS[number].tests)})
        )
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
