"""Kills a process that writes to a page store, again and again, and looks at what it left.

In: a folder, a number of kills, a seed. Out: JSON with what was found, on stdout. Each victim is
forked from this process, goes on with what is in the store, and tells by a pipe what it flushed;
after `kill -9` this process opens the store and compares everything in it with the truth.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np

from cacheslide_agents.pages import EVICTIONS, SlideStore

SESSIONS = 3
ROUNDS = 2
BLOCKS = 12


def _world() -> Any:
    spec = spec_from_file_location("page_world", Path(__file__).parent / "page_world.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["page_world"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


world = _world()


class Chain:
    """All turns of one session, made when they are needed, the same every time."""

    def __init__(self, number: int) -> None:
        self.session = f"s{number}"
        self._rng = np.random.default_rng(number)
        self.steps: list[Any] = [(world.first_turn(self._rng, 60, self.session), None, [])]

    def up_to(self, number: int) -> None:
        while len(self.steps) <= number:
            last = self.steps[-1][0]
            self.steps.append(world.next_turn(self._rng, last, 6, corrected=0.1, removed=6))

    def number_of(self, context: Any) -> int:
        """-1 where no turn has these tokens."""
        tokens = context.ids.tobytes()
        return next(
            (n for n, step in enumerate(self.steps) if step[0].context.ids.tobytes() == tokens), -1
        )


def opened(path: Path, kill: int) -> SlideStore:
    return SlideStore(
        BLOCKS * world.BLOCK_BYTES,
        path,
        eviction=EVICTIONS[kill % len(EVICTIONS)],
        write_ahead=kill % 2 == 0,
    )


def stored(store: SlideStore, chain: Chain) -> Any:
    found = [c for c in store.find(world.KEY, chain.session) if c.session == chain.session]
    assert len(found) <= 1
    return found[0] if found else None


def work(path: Path, kill: int, chains: list[Chain], pipe: int) -> None:
    """Put and flush the next turns of every session; a line for every step, with what is on SSD."""

    def tell(done: dict[str, int]) -> None:
        os.write(pipe, (json.dumps(done) + "\n").encode())

    with opened(path, kill) as store:
        for _ in range(ROUNDS):
            done = {}
            for chain in chains:
                tell({})
                old = stored(store, chain)
                number = -1 if old is None else chain.number_of(old)
                turn, given, runs = chain.steps[number + 1]
                if number < 0:
                    store.put(turn.context, turn.layers)
                else:
                    with store.lease([old]) as lease:
                        mine = [replace(run, source=old) for run in runs]
                        store.put(turn.context, given, reused=mine, lease=lease)
                done[chain.session] = number + 1
            tell({})
            store.flush()
            tell(done)


def victim(path: Path, kill: int, chains: list[Chain], steps: int, more_s: float) -> dict[str, int]:
    """Fork, let it take that many steps and a little time, kill it; what it had flushed by then."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            work(path, kill, chains, writer)
        finally:
            os._exit(0)
    os.close(writer)
    told = b""
    while told.count(b"\n") < steps and (part := os.read(reader, 65536)):
        told += part
    time.sleep(more_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while part := os.read(reader, 65536):
        told += part
    os.close(reader)
    flushed = [json.loads(line) for line in told.splitlines()]
    return dict(item for line in flushed for item in line.items())


def look(path: Path, chains: list[Chain], committed: dict[str, int], found: dict[str, int]) -> None:
    with opened(path, 1) as store:
        for chain in chains:
            context = stored(store, chain)
            number = -1 if context is None else chain.number_of(context)
            if number < committed.get(chain.session, -1):
                found["lost"] += 1
            if context is None:
                continue
            turn = world.Turn(context, chain.steps[max(number, 0)][0].layers)
            if number < 0 or not world.same(store, turn):
                found["wrong"] += 1
            found["right"] += 1
            found["newest"] = max(found["newest"], number)


def main(path: Path, kills: int, seed: int) -> None:
    choose = random.Random(seed)
    chains = [Chain(number) for number in range(SESSIONS)]
    committed: dict[str, int] = {}
    found = {"kills": 0, "right": 0, "wrong": 0, "lost": 0, "newest": 0, "mid_work": 0}
    steps_of_all = ROUNDS * (SESSIONS + 2)
    step_s = 0.0
    for kill in range(kills + 1):
        for chain in chains:
            chain.up_to(found["newest"] + 2 * ROUNDS)
        if kill == 0:  # all of it, to see how long a step takes
            started = time.perf_counter()
            committed |= victim(path, kill, chains, steps_of_all, 0.0)
            step_s = (time.perf_counter() - started) / steps_of_all
        else:
            steps = choose.randrange(steps_of_all)
            told = victim(path, kill, chains, steps, choose.uniform(0, step_s))
            committed |= told
            found["kills"] += 1
            found["mid_work"] += bool(told)
        look(path, chains, committed, found)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
