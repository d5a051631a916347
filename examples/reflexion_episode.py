"""A live Reflexion episode: answer, reflect on the failure, answer again, with reuse all along.

In: a question shipped with the package. Out: each trial's answer and what it reused.
"""

from cacheslide_agents.bench.demo import demo_episode
from cacheslide_agents.bench.metrics import exact_match
from langchain_cacheslide import ChatCacheSlide, to_prompt_value

TRIALS = 3


def main() -> None:
    actor = ChatCacheSlide(model="smollm2-135m", max_tokens=16, stop=["\n"])
    episode = demo_episode()
    reflections: list[str] = []
    print(episode.question.question)
    for trial in range(1, TRIALS + 1):
        answer = actor.invoke(to_prompt_value(episode.prompt(reflections)))
        receipt = answer.response_metadata["cacheslide"]
        print(
            f"{trial}. {answer.text.strip()!r}: {receipt['outcome']}, {receipt['reused_tokens']} "
            f"of {receipt['prompt_tokens']} tokens reused, {receipt['ttft_s']:.2f} s"
        )
        if exact_match(answer.text, [episode.question.answer]):
            break
        thought = actor.invoke(
            to_prompt_value(episode.reflect(reflections, answer.text)), max_tokens=48
        )
        reflections.append(thought.text.strip())


if __name__ == "__main__":
    main()
