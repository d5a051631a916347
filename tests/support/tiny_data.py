"""A data folder of a few rows in our own words, laid out like the real one.

In: an empty folder. Out: its four `.jsonl` files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

QUESTIONS = [
    {
        "id": f"q{number}",
        "question": f"Which river flows past mill {number}?",
        "answer": f"the Brook {number}",
        "supporting_titles": [f"Mill {number}.3", f"Mill {number}.7"],
        "paragraphs": [
            {"title": f"Mill {number}.{part}", "text": f"Mill {number}.{part} stands by water."}
            for part in range(10)
        ],
    }
    for number in range(11)
]
REFLEXION_RUNS = [
    {
        "id": "q0:react",
        "hotpotqa_id": "q0",
        "trials": [
            {"trial": 1, "reflections": [], "trajectory": "Thought 1: look.\nGive up."},
            {"trial": 2, "reflections": ["Look twice."], "trajectory": "Action 1: Finish[Rhine]"},
            {"trial": 3, "reflections": ["Look twice."], "trajectory": "Action 1: Finish[Elbe]"},
            {"trial": 4, "reflections": ["Look twice.", "Ask."], "trajectory": "Action 1: Look"},
        ],
    },
    {
        "id": "q1:cot",
        "hotpotqa_id": "q1",
        "trials": [{"trial": 1, "reflections": [], "trajectory": "Action 1: Finish[Brook]"}],
    },
]
DIALOGUES = [
    {
        "id": "talk",
        "sessions": [
            [
                {
                    "speaker": f"Speaker {1 + turn % 2}",
                    "text": f"Session {session}, line {turn}. "
                    + "We spoke of boats and weather for a good while. " * 6,
                }
                | ({"fact": f"I own boat {session}.{turn}."} if turn in (1, 5) else {})
                for turn in range(6)
            ]
            for session in range(4)
        ],
        "questions": [
            {"question": "What does Speaker 2 own?", "answer": "boats"},
            {"question": "Who rows?", "answer": "Speaker 1"},
        ],
    },
    {
        "id": "short",
        "sessions": [
            [{"speaker": "Speaker 1", "text": "Hello."}, {"speaker": "Speaker 2", "text": "Hi."}]
        ],
        "memory": [["I bake."], ["I sing.", "I rest."]],
        "questions": [{"question": "Who bakes?", "answer": "Speaker 1"}],
    },
]


def trajectory(name: str, exchanges: int, issue: str = "Sums are wrong.") -> dict[str, Any]:
    """Action n is `run n`; its output has n lines."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You fix code."},
        {"role": "user", "content": f"Please solve: {issue}"},
    ]
    for number in range(1, exchanges + 1):
        call = {"name": "bash", "arguments": json.dumps({"command": f"run {number}"})}
        output = "\n".join(f"output {number}, line {line}" for line in range(number))
        messages.append({"role": "assistant", "content": f"Step {number}.", "tool_calls": [call]})
        messages.append({"role": "tool", "content": output})
    return {"id": name, "problem_statement": issue, "messages": messages}


TRAJECTORIES = [trajectory("long", 12), trajectory("brief", 5)]


def write_words(folder: Path) -> Path:
    """Text to train on: thirty lines of forty words, of five that there are."""
    path = folder / "text.jsonl"
    words = np.random.default_rng(1).choice(["one", "two", "three", "more", "less"], (30, 40))
    path.write_text("".join(json.dumps({"text": " ".join(row)}) + "\n" for row in words))
    return path


def write_tiny_data(folder: Path) -> Path:
    files: Mapping[str, Iterable[Any]] = {
        "hotpotqa/dev.jsonl": QUESTIONS,
        "hotpotqa/reflexion_dev.jsonl": REFLEXION_RUNS,
        "msc/dev.jsonl": DIALOGUES,
        "swe_agent/dev.jsonl": TRAJECTORIES,
    }
    for name, rows in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return folder
