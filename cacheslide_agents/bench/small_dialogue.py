"""A conversation between a person and a companion with memory, in our own words.

In: nothing. Out: what was known before it, what the person says, and the answers, function calls
included, of a companion that keeps its memory well, which can be replayed.
"""

from __future__ import annotations

import json
from typing import Any

PERSONA = "My name is Ilse. I am curious, warm and a little dry. I never pretend to know things."
HUMAN = "The person I talk to is called Marit.\nShe lives in Tromso and repairs boats."
ARCHIVE = (
    "user: My grandfather built the first boat I ever steered. He called it Havsule.",
    "assistant: A gannet! Did he name all his boats after birds?",
    "user: All of them. The last one was Teist, and she still sails.",
    "user: I have a dog. He is old and sleeps under the workbench all day.",
    "assistant: He sounds like the wisest person in the workshop.",
    "user: In spring I want to sail to Lofoten, if the engine of Teist lets me.",
    "user: I cannot stand coffee. Tea, black, as strong as tar.",
    "assistant: Then I will never offer you coffee, not even a metaphorical one.",
)
"""What was said in earlier weeks and is out of view."""

SAYS = (
    "Hello again! It has been a while. I have moved: I live in Bodo now, on the harbour.",
    "The workshop came with me, all of it. The dog did not like the ferry at all.",
    "I took on an apprentice last month. Her name is Signe and she is better at wood than I am.",
    "Do you remember what my grandfather's boats were called?",
    "Teist has a new engine by the way. An electric one. So Lofoten it is, in May.",
    "What should I bring for Signe? She has her birthday on the third of February.",
    "Where do I live, and what do I drink?",
)
GOLD = "Bodo, strong black tea"
"""What the last answer should say."""


def _call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _say(message: str) -> str:
    return _call("send_message", message=message)


def _note(content: str) -> str:
    return _call("core_memory_append", block="human", content=content)


KEPT = (
    _call(
        "core_memory_replace",
        block="human",
        old="She lives in Tromso and repairs boats.",
        new="She lives in Bodo, on the harbour, and repairs boats.",
    ),
    _say("Marit! Bodo, and on the harbour: so you can hear the boats at night."),
    _note("Her workshop moved with her; her dog dislikes ferries."),
    _say("Poor dog. No workbench to sleep under for a whole crossing."),
    _note("Her apprentice is called Signe and is very good with wood."),
    _say("You sound pleased about it. What is Signe building first?"),
    _call("archival_memory_search", query="grandfather boat called", page=0),
    _say("Havsule was the one you learned on, and Teist still sails. Gannet and guillemot."),
    _note("Her boat Teist has an electric engine; she sails to Lofoten in May."),
    _say("An electric guillemot! Then it only has to learn to be quiet about it."),
    _note("Signe's birthday is the third of February."),
    _say("A good plane, sharpened by you. That is a present and a compliment."),
    _call("archival_memory_search", query="drink tea coffee", page=0),
    _say("You live in Bodo, on the harbour, and you drink black tea, as strong as tar."),
)
"""The companion's answers: two for each thing Marit says."""
