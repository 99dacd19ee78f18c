"""What one engine is asked to do and to time. Prompts, suffixes and chats are the same in every engine of a run."""

from __future__ import annotations

import itertools
import resource
import time
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.engines.shapes import VOCABULARY, Work

now = time.perf_counter
_SETTLE_S = 0.5  # time for the stores of a fill to end
_STORE_S = 0.004  # time for the store of a hit's new tokens, which belongs to the hit's CPU time
_TRIES, _PAUSE_S = 100, 0.01
_PACE_LOOPS = 20_000  # about a millisecond of Python
_STEP_LOOPS = 500  # some 20 us before each step of a round of several requests
# Numbers of generators of random tokens, so that no two texts of different kinds are the same.
_PREFIX, _SUFFIX, _DECODER, _CONTEXT, _ASKED = range(5)


def tokens(kind: int, number: int, count: int) -> list[int]:
    """Return random tokens, the same for the same numbers.

    >>> tokens(0, 7, 3) == tokens(0, 7, 3), tokens(0, 7, 3) == tokens(1, 7, 3), len(tokens(0, 7, 3))
    (True, False, 3)
    """
    return np.random.default_rng((kind, number)).integers(0, VOCABULARY - 1, count).tolist()


def cpu_seconds() -> float:
    """Return the CPU time of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def pace(loops: int = _PACE_LOOPS) -> float:
    """Return the seconds of a fixed piece of Python: a shared machine's CPU has other paces at other times."""
    began, left = now(), loops
    while left:
        left -= 1
    return now() - began


class Measures:
    """The measures of one engine. Each returns plain data; times are in seconds.

    A hit is a request whose prompt is a prefix that the host holds, and new tokens behind it; it asks for one token.
    ``first`` is the number of the first hit: the same number gives the same new tokens in every engine. ``pace`` of a
    hit is the longer one of :func:`pace` before it and behind it.
    """

    NAMES = ("fill", "fill_chats", "alone", "resident", "beside", "chats", "link")

    def __init__(self, llm: Any, work: Work) -> None:
        from vllm import SamplingParams

        self.llm, self.engine, self.work = llm, llm.llm_engine, work
        self._sampling = SamplingParams
        self._one = self.sampling(1)
        self._prefixes = {
            held: [tokens(_PREFIX, 1000 * place + k, held + 1) for k in range(work.prompts[place])]
            for place, held in enumerate(work.held)
        }
        self._contexts: list[list[int]] = []
        self._local = self._watch_lookups()

    def sampling(self, count: int) -> Any:
        """Return parameters of greedy sampling of ``count`` tokens."""
        return self._sampling(temperature=0, max_tokens=count, ignore_eos=True)

    def _watch_lookups(self) -> list[int]:
        """Note how many tokens of each request the GPU's own cache held."""
        manager = self.engine.engine_core.engine_core.scheduler.kv_cache_manager
        found: list[int] = []
        for name in ("get_computed_blocks", "get_computed_blocks_for_connector"):
            lookup = getattr(manager, name)

            def noted(*given: Any, _lookup: Any = lookup, **named: Any) -> Any:
                answer = _lookup(*given, **named)
                found.append(int(answer[1]))
                return answer

            setattr(manager, name, noted)
        return found

    def prompt(self, held: int, number: int, suffix: int) -> dict[str, list[int]]:
        """Return the prompt of a hit: one of the held prefixes in turn, and new tokens."""
        prefixes = self._prefixes[held]
        return {"prompt_token_ids": prefixes[number % len(prefixes)][:held] + tokens(_SUFFIX, number, suffix)}

    def generate(self, prompts: list[Any], sampling: Any) -> list[Any]:
        """Serve prompts, and return their outputs."""
        return self.llm.generate(prompts, sampling, use_tqdm=False)

    def settle(self) -> None:
        """Let stores end. The scheduler learns of it in a step, and steps need a request."""
        for number in range(3):
            time.sleep(_SETTLE_S / 3)
            self.generate([{"prompt_token_ids": tokens(_DECODER, number, 8)}], self._one)

    def empty_gpu(self) -> None:
        """Make the GPU's own cache forget all prompts; the host keeps them.

        Raises:
            RuntimeError: a connector keeps blocks of the GPU.
        """
        for _ in range(_TRIES):
            if self.llm.reset_prefix_cache():
                return
            time.sleep(_PAUSE_S)  # a store is on its way; the scheduler frees its blocks in a step
            self.generate([{"prompt_token_ids": tokens(_DECODER, 0, 8)}], self._one)
        raise RuntimeError(f"the GPU's cache could not be emptied after {_TRIES} tries: the connector keeps blocks")

    # ---- before anything is timed ------------------------------------------------------------------------------------

    def fill(self, held: int) -> dict[str, Any]:
        """Serve every prefix once, so that the host holds them all."""
        began = now()
        self.generate([{"prompt_token_ids": one} for one in self._prefixes[held]], self._one)
        self.settle()
        return {"seconds": now() - began}

    def fill_chats(self) -> dict[str, Any]:
        """Serve every session's first context once."""
        chats, began = self.work.chats, now()
        self._contexts = [tokens(_CONTEXT, k, chats.context) for k in range(chats.sessions)]
        self.generate([{"prompt_token_ids": one} for one in self._contexts], self._one)
        self.settle()
        return {"seconds": now() - began}

    # ---- one request at a time ---------------------------------------------------------------------------------------

    def alone(self, held: int, suffix: int, hits: int, first: int) -> dict[str, Any]:
        """Serve hits, one at a time."""
        times, paces, cached, first_tokens, local, cpus = [], [], [], [], [], []
        for k in range(hits):
            prompt = self.prompt(held, first + k, suffix)
            self.empty_gpu()
            self._local.clear()
            before = pace()
            used, began = cpu_seconds(), now()
            (served,) = self.generate([prompt], self._one)
            times.append(now() - began)
            time.sleep(_STORE_S)
            cpus.append(cpu_seconds() - used)
            paces.append(max(before, pace()))
            cached.append(served.num_cached_tokens or 0)
            local.append(max(self._local, default=0))
            first_tokens += served.outputs[0].token_ids
        return {"ttft": times, "pace": paces, "cached": cached, "local": local, "cpus": cpus, "tokens": first_tokens}

    def resident(self, held: int, suffix: int, hits: int, first: int) -> dict[str, Any]:
        """Serve hits whose prefix is on the GPU already: the time of the compute alone."""
        times, paces, local = [], [], []
        for k in range(hits):
            prefix = self.prompt(held, first + k, 0)["prompt_token_ids"]
            self.generate([{"prompt_token_ids": prefix + tokens(_SUFFIX, first + k, suffix)}], self._one)
            again = {"prompt_token_ids": prefix + tokens(_SUFFIX, first + hits + k, suffix)}
            self._local.clear()
            before, began = pace(), now()
            self.generate([again], self._one)
            times.append(now() - began)
            paces.append(max(before, pace()))
            local.append(max(self._local, default=0))
        return {"ttft": times, "pace": paces, "local": local}

    # ---- several requests --------------------------------------------------------------------------------------------

    def beside(self, held: int, suffix: int, hits: int, first: int) -> dict[str, Any]:
        """Serve hits while other requests decode.

        Returns:
            ``ttft`` of hits; ``itl``, times between tokens of the decoding requests in steps that had a hit in flight;
            ``tokens``, ``seconds`` and ``cpu`` of all steps, and their ``mean_pace``.
        """
        work, engine = self.work, self.engine
        self.empty_gpu()
        longest = 40 + (hits + 3) * work.every
        prompts = [self.prompt(held, first + k, suffix) for k in range(hits)]
        for k in range(work.decoders):
            prompt = {"prompt_token_ids": tokens(_DECODER, first * work.decoders + k, 200)}
            engine.add_request(f"decode-{first}-{k}", prompt, self.sampling(longest))
        for _ in range(30):
            engine.step()
        last: dict[str, float] = {}
        itl: list[float] = []
        times: list[float] = []
        cached: list[int] = []
        paces: list[float] = []
        waiting: dict[str, float] = {}
        asked = steps = made = 0
        self._local.clear()  # from here on, lookups are those of hits
        began, cpu = now(), cpu_seconds()
        while (asked < hits or waiting) and steps < longest - 32:
            if asked < hits and steps % work.every == 0:
                name = f"hit-{first}-{asked}"
                waiting[name] = now()
                engine.add_request(name, prompts[asked], self._one)
                asked += 1
            loading = bool(waiting)
            paces.append(pace(_STEP_LOOPS))
            served = engine.step()
            ended = now()
            for one in served:
                if one.request_id.startswith("decode"):
                    if one.request_id in last and loading:
                        itl.append(ended - last[one.request_id])
                    last[one.request_id] = ended
                    made += 1
                elif one.finished:
                    times.append(ended - waiting.pop(one.request_id))
                    cached.append(one.num_cached_tokens or 0)
            steps += 1
        seconds, cpu, local = now() - began, cpu_seconds() - cpu, [*self._local]
        while engine.has_unfinished_requests():
            engine.step()
        return {"ttft": times, "itl": itl, "tokens": made, "seconds": seconds, "cpu": cpu,
                "unserved": len(waiting), "cached": cached, "local": local,
                "mean_pace": fmean(paces)}  # fmt: skip

    def chats(self, first: int) -> dict[str, Any]:
        """Serve some turns of every session. A session's next prompt is its last one, the answer and new tokens.

        Returns:
            ``ttft`` of all turns; ``cached`` and ``prompted`` tokens, ``answered`` tokens; ``seconds`` and ``cpu``;
            the ``mean_pace`` of all steps.
        """
        self.empty_gpu()
        chats, engine = self.work.chats, self.engine
        texts = [list(context) for context in self._contexts]
        turns = iter(itertools.product(range(chats.turns), range(chats.sessions)))
        in_flight: dict[str, tuple[int, float]] = {}
        held_back: list[tuple[int, int]] = []  # turns whose session still waits for its last answer
        times, cached, prompted, answered, cpu = [], 0, 0, 0, cpu_seconds()

        def next_turn() -> tuple[int, int] | None:
            busy = {session for session, _ in in_flight.values()}
            for place, (_, session) in enumerate(held_back):
                if session not in busy:
                    return held_back.pop(place)
            for turn, session in turns:
                if session not in busy:
                    return turn, session
                held_back.append((turn, session))
            return None

        paces: list[float] = []
        began = now()
        while True:
            while len(in_flight) < chats.in_flight and (found := next_turn()) is not None:
                turn, session = found
                texts[session] += tokens(_ASKED, (first * chats.turns + turn) * chats.sessions + session, chats.asked)
                name = f"chat-{first}-{turn}-{session}"
                in_flight[name] = (session, now())
                engine.add_request(name, {"prompt_token_ids": texts[session]}, self.sampling(chats.answered))
            if not in_flight:
                break
            paces.append(pace(_STEP_LOOPS))
            served = engine.step()
            for one in served:
                session, asked = in_flight[one.request_id]
                if len(one.outputs[0].token_ids) == 1:
                    times.append(now() - asked)
                if one.finished:
                    texts[session] = texts[session] + list(one.outputs[0].token_ids)
                    cached += one.num_cached_tokens or 0
                    prompted += len(one.prompt_token_ids)
                    answered += len(one.outputs[0].token_ids)
                    del in_flight[one.request_id]
        return {"ttft": times, "cached": cached, "prompted": prompted, "answered": answered, "seconds": now() - began,
                "cpu": cpu_seconds() - cpu, "mean_pace": fmean(paces)}  # fmt: skip

    # ---- the machine -------------------------------------------------------------------------------------------------

    def link(self, nbytes: int = 1 << 29, repeats: int = 5) -> dict[str, Any]:
        """Copy one large piece of pinned memory to the GPU, and return bytes per second; 0 without a GPU."""
        import torch

        if not torch.cuda.is_available():
            return {"rate": 0.0}
        host = torch.empty(nbytes, dtype=torch.int8, pin_memory=True)
        device = torch.empty(nbytes, dtype=torch.int8, device="cuda")
        rates = []
        for _ in range(repeats):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            device.copy_(host, non_blocking=True)
            after.record()
            after.synchronize()
            rates.append(nbytes / before.elapsed_time(after) * 1e3)
        return {"rate": sorted(rates)[len(rates) // 2]}
