"""`kill -9` in the middle of writing: never a wrong answer, never a lost committed context."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = 200
SCRIPT = Path(__file__).parent / "support" / "kill_store.py"


@pytest.mark.timeout(900)  # a minute or less on a core of its own
def test_two_hundred_kills_lose_nothing_that_was_committed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), str(KILLS), "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == KILLS
    assert (found["wrong"], found["lost"]) == (0, 0)
    assert found["right"] >= 3 * KILLS, "every session was there after every kill"
    assert found["mid_work"] > KILLS / 10 and found["newest"] > 20, "the victims had done work"
