"""Cases of a value that changed in memory while the history after it stayed as it was.

In: nothing. Out: `Case`s: companion prompts before and after the change, with a history that does
not speak of the value, speaks of the old one, or of the new one. Names, values and lines are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import cycle, islice, product

from cacheslide_agents.bench.workloads.base import Turn, template
from cacheslide_agents.bench.workloads.functions import FUNCTIONS
from cacheslide_agents.chunks import ChunkedPrompt

HISTORIES = ("neutral", "old", "new")
"""What the history says of the value."""
EXCHANGES = 10
SHOWN_FUNCTIONS = FUNCTIONS[:3]
"""Enough to tell and to edit; short prompts leave time for more cases."""
_NOW = datetime(2024, 5, 13, 18, 20)


@dataclass(frozen=True, slots=True)
class Subject:
    """A kind of fact. `{name}` and `{value}` are filled in; an answer is `fact` again, and the
    question asks for its beginning, for a small model would else speak of something else.

    `old_lines` were said while the old value held, `new_lines` after the change.
    """

    fact: str
    question: str
    old_lines: tuple[str, str]
    new_lines: tuple[str, str]
    people: tuple[str, str]
    values: tuple[tuple[str, str], tuple[str, str]]


SUBJECTS = (
    Subject(
        "{name} lives in {value}.",
        "Where does {name} live?",
        ("I have been in {value} for years and still get lost.", "{value} is easy to love."),
        ("The boxes are unpacked, I am at home in {value} now.", "Welcome to {value}!"),
        ("Anna", "Boris"),
        (("Oslo", "Lima"), ("Cairo", "Dublin")),
    ),
    Subject(
        "{name} works as a {value}.",
        "What does {name} work as?",
        ("A long week, but I like being a {value}.", "Not everybody could be a {value}."),
        ("I changed my trade, I am a {value} now.", "A {value}! How did that come about?"),
        ("Carla", "Daniel"),
        (("nurse", "baker"), ("teacher", "pilot")),
    ),
    Subject(
        "{name} drives a {value} car.",
        "What colour is {name}'s car?",
        ("I washed the {value} car before the rain came.", "A {value} car shows every drop."),
        ("I sold my car and bought a {value} one.", "A {value} one suits you."),
        ("Elena", "Felix"),
        (("red", "blue"), ("green", "black")),
    ),
    Subject(
        "{name} has a dog called {value}.",
        "What is {name}'s dog called?",
        ("{value} stole my sandwich again.", "{value} must have been hungry."),
        ("We brought a dog home from the shelter, {value}.", "{value} is lucky to have you."),
        ("Greta", "Hugo"),
        (("Rex", "Bella"), ("Luna", "Max")),
    ),
    Subject(
        "{name} sits in room {value}.",
        "In which room does {name} sit?",
        ("Come by room {value} when you are in the building.", "Room {value}, noted."),
        ("They moved my desk, I am in room {value} now.", "Room {value}, noted."),
        ("Irene", "Jakob"),
        (("214", "530"), ("118", "402")),
    ),
    Subject(
        "{name} plays chess every {value}.",
        "On which day does {name} play chess?",
        ("See you after the game, it is {value} as always.", "{value} it is."),
        ("The club changed the evening, we play every {value} now.", "{value}, good to know."),
        ("Klara", "Leon"),
        (("Tuesday", "Friday"), ("Monday", "Thursday")),
    ),
)

_KNOWN = (
    "{name} drinks tea in the morning.",
    "{name} has two brothers.",
    "{name} is learning to play the cello.",
    "{name} does not eat fish.",
    "{name} reads a book a week.",
    "{name} is afraid of heights.",
    "{name} collects old maps.",
)
_TALK = (
    ("I slept badly, the neighbours had guests.", "I hope tonight is quieter."),
    ("The bakery at the corner has closed for good.", "That is a pity, its bread was fine."),
    ("I finally finished that long novel.", "Was the ending worth it?"),
    ("It was, although the middle dragged a little.", "Long novels are allowed to drag."),
    ("The cello is hard, I hold the bow too tightly.", "Then loosen your thumb first."),
    ("We cooked for eight people on the weekend.", "What did you serve?"),
    ("A stew with beans, and plums for dessert.", "That sounds like a good evening."),
    ("The train was late again this morning.", "How long did you have to wait?"),
    ("Almost an hour, and no bench was free.", "An hour is long without a bench."),
    ("I found a map from 1890 at the market.", "What does it show?"),
    ("A coast with villages that are gone today.", "Then it is worth keeping."),
    ("My brother wants to visit in June.", "Do you have room for him?"),
    ("He can sleep on the sofa, he is used to it.", "A good sofa makes good guests."),
    ("I think I will repaint the kitchen.", "Take a bright colour, it is a dark room."),
    ("Do you think that it will rain tomorrow?", "The forecast says it stays dry."),
    ("Then I will hang the washing outside.", "Do that early, it is windy later."),
)


@dataclass(frozen=True, slots=True)
class Case:
    """Turn t-1 knows `old`, turn t `new`; `answers` are the sentences that say either."""

    id: str
    history: str
    old: str
    new: str
    answers: tuple[str, str]
    turn: Turn


def stale_cases() -> list[Case]:
    """All cases: every value takes part both ways, so that no word is favoured by its own odds.

    Histories, subjects and directions alternate: any first part of the list is a fair sample.
    """
    people = [(subject, who) for who in (0, 1) for subject in SUBJECTS]
    ordered = product((False, True), enumerate(people), HISTORIES)
    return [
        _case(subject, who, swapped, history, number)
        for swapped, (number, (subject, who)), history in ordered
    ]


def _case(subject: Subject, who: int, swapped: bool, history: str, number: int) -> Case:
    name = subject.people[who]
    old, new = reversed(subject.values[who]) if swapped else subject.values[who]
    talk = _history(subject, name, {"old": old, "new": new}.get(history), history, number)
    lead = subject.fact.partition(" {value}")[0]
    question = f'{subject.question} Begin your reply with "{lead}".'.format(name=name)
    known = [fact.format(name=name) for fact in _KNOWN]

    def prompt(value: str, minutes: int) -> ChunkedPrompt:
        return template("memgpt").render(
            timestamp=(_NOW + timedelta(minutes=minutes)).strftime("%Y-%m-%d %H:%M"),
            counters={
                "messages in recall memory": 96 + 2 * number + len(talk) + minutes,
                "facts in core memory": len(known) + 1,
            },
            facts=[*known[:3], subject.fact.format(name=name, value=value), *known[3:]],
            functions=SHOWN_FUNCTIONS,
            dialogue=talk,
            question=question,
        )

    case = f"{name}, {old} to {new}, history {history}"
    turn = Turn(case, 1, "memgpt", prompt(old, 0), prompt(new, 2), (new,))
    answers = (subject.fact.format(name=name, value=old), subject.fact.format(name=name, value=new))
    return Case(case, history, old, new, answers, turn)


def _history(
    subject: Subject, name: str, value: str | None, history: str, number: int
) -> list[dict[str, str]]:
    """`EXCHANGES` of small talk, the fifth of which speaks of `value` if there is one."""
    talk = list(islice(cycle(_TALK), number, number + EXCHANGES))
    if value is not None:
        said = subject.old_lines if history == "old" else subject.new_lines
        talk[4] = (said[0].format(value=value), said[1].format(value=value))
    speakers: Sequence[str] = (name, "Companion")
    return [
        {"speaker": speaker, "text": text}
        for exchange in talk
        for speaker, text in zip(speakers, exchange, strict=True)
    ]
