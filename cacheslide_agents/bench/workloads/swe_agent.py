"""SWE-agent: one more command and its output, while one more old output becomes a one-line note.

In: `swe_agent/dev.jsonl`. Out: up to three drafts per trajectory, at 1/3, 1/2 and 2/3 of its
exchanges. System and issue | history, of which the last 5 observations are shown | cue. From t-1 to
t one exchange is appended and one more observation is elided (a negative shift).
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from pathlib import Path

from cacheslide_agents.bench.datasets import AgentMessage, Trajectory, trajectories
from cacheslide_agents.bench.workloads.base import Draft, Limits, Turn, cut_middle, template
from cacheslide_agents.chunks import ChunkedPrompt

SHOWN_OBSERVATIONS = 5
HEAD_TOKENS = 1200
"""System and issue together."""
MESSAGE_TOKENS = 600
_FRACTIONS = ((1, 3), (1, 2), (2, 3))


def drafts(folder: Path, limits: Limits) -> list[Draft]:
    """In file order. Only turns that elide an observation within the window are built."""
    return [_draft(agent, turn) for agent in agents(folder, limits) for turn in agent.turns]


def agents(folder: Path, limits: Limits) -> list[Agent]:
    return [Agent(one, limits) for one in trajectories(folder / "swe_agent" / "dev.jsonl")]


class Agent:
    """One trajectory: the prompt it had after any number of exchanges."""

    def __init__(self, trajectory: Trajectory, limits: Limits) -> None:
        self.id = trajectory.id
        self._system, self._issue = trajectory.messages[0].content, trajectory.issue
        steps = trajectory.messages[2:]
        self._exchanges = tuple(zip(steps[::2], steps[1::2], strict=False))
        self._limits = limits
        self._cuts: dict[str, str] = {}
        self._first: dict[int, int] = {}

    @property
    def exchanges(self) -> int:
        return len(self._exchanges)

    @cached_property
    def turns(self) -> list[int]:
        """Exchanges at a third, half and two thirds, but no fewer than make one elision."""
        total, least = len(self._exchanges), SHOWN_OBSERVATIONS + 1
        wanted = {max(least, total * part // whole) for part, whole in _FRACTIONS}
        return sorted(turn for turn in wanted if turn <= total)

    def exchange(self, turn: int) -> tuple[str, str]:
        """Action and observation number `turn`, counted from 1."""
        action, observation = self._exchanges[turn - 1]
        return self._cut(action_text(action)), self._cut(observation.content)

    def prompt(self, turn: int) -> ChunkedPrompt | None:
        """The prompt after `turn` exchanges, if the last of them fits."""
        first = self.first_shown(turn)
        return self._prompt(first, turn) if first < turn else None

    def elides(self, turn: int) -> bool:
        """Whether turn `turn` shows as a note what the turn before showed in full."""
        newly = turn - 1 - SHOWN_OBSERVATIONS
        return newly >= max(self.first_shown(turn - 1), self.first_shown(turn))

    def first_shown(self, turn: int) -> int:
        """The oldest are dropped until the prompt fits: the first exchange that is not."""
        if turn not in self._first:
            self._first[turn] = bisect_left(
                range(turn), True, key=lambda first: self._limits.fits(self._prompt(first, turn))
            )
        return self._first[turn]

    def _prompt(self, first: int, turn: int) -> ChunkedPrompt:
        history = []
        for number in range(first, turn):
            action, observation = self._exchanges[number]
            elided = number < turn - SHOWN_OBSERVATIONS  # its note counts the lines of it all
            output = observation.content if elided else self._cut(observation.content)
            said = self._cut(action_text(action))
            history.append({"id": f"{number + 1}-action", "role": "assistant", "text": said})
            history.append({"id": f"{number + 1}-output", "role": "user", "text": output})
        system, issue = self._head
        return template("swe_agent").render(
            system=system,
            issue=issue,
            history=history,
            keep_observations=SHOWN_OBSERVATIONS,
        )

    @cached_property
    def _head(self) -> tuple[str, ...]:
        return cut_middle((self._system, self._issue), HEAD_TOKENS, self._limits.text)

    def _cut(self, text: str) -> str:
        if text not in self._cuts:
            self._cuts[text] = cut_middle((text,), MESSAGE_TOKENS, self._limits.text)[0]
        return self._cuts[text]


def action_text(message: AgentMessage) -> str:
    """What the agent said, with its tool calls as text, which every chat template can carry."""
    calls = [f"{name} {arguments}" for name, arguments in message.tool_calls]
    return "\n\n".join(part for part in (message.content, *calls) if part)


def _draft(agent: Agent, turn: int) -> Draft:
    def build() -> Turn | None:
        before, now = agent.prompt(turn - 1), agent.prompt(turn)
        if before is None or now is None or not agent.elides(turn):
            return None
        return Turn(agent.id, turn, "swe_agent", before, now)

    return Draft(agent.id, turn, "swe_agent", build)
