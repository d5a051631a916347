"""Three agents whose prompts come from the packaged templates, as LangGraph graphs.

    log = CallLog()
    agent = reflexion_graph(ChainOfThought(model), evaluate)
    agent.invoke({"question": ..., "passages": [...]}, {"callbacks": [log]})
    for call in log.calls: print(call.step, call.receipt["outcome"])

`model` is any LangChain chat model; with a `ChatCacheSlide` the prompts' chunks are reused. Around
a model, `Replayed` asks it the same prompts but gives recorded answers. Needs the extra `agents`.
"""

from langchain_cacheslide.agents.actors import Actor, Attempt, ChainOfThought, Question
from langchain_cacheslide.agents.calls import Call, CallLog
from langchain_cacheslide.agents.companion import Companion
from langchain_cacheslide.agents.memgpt import fresh_memory, memgpt_graph, reply
from langchain_cacheslide.agents.printing import call_line, printer, sum_line
from langchain_cacheslide.agents.react import React
from langchain_cacheslide.agents.reflexion import ModelJudge, reflexion_graph
from langchain_cacheslide.agents.replay import Replayed
from langchain_cacheslide.agents.shell import Shell
from langchain_cacheslide.agents.swe import swe_graph

__all__ = [
    "Actor",
    "Attempt",
    "Call",
    "CallLog",
    "ChainOfThought",
    "Companion",
    "ModelJudge",
    "Question",
    "React",
    "Replayed",
    "Shell",
    "call_line",
    "fresh_memory",
    "memgpt_graph",
    "printer",
    "reflexion_graph",
    "reply",
    "sum_line",
    "swe_graph",
]
