"""Two trials of one question: the second reuses what the first computed. In the README too."""

from cacheslide_agents.bench.demo import sample_questions
from langchain_cacheslide import ChatCacheSlide, TemplateRunnable

chain = TemplateRunnable.named("reflexion") | ChatCacheSlide(model="smollm2-135m", max_tokens=16)
asked, *examples = sample_questions()  # HotpotQA, ten paragraphs each
values = {"examples": examples, "paragraphs": asked.paragraphs, "question": asked.question}
chain.invoke({**values, "reflections": []})
answer = chain.invoke({**values, "reflections": ["I gave a date. I will give a name."]})
receipt = answer.response_metadata["cacheslide"]
print(receipt["outcome"], receipt["reused_tokens"], "of", receipt["prompt_tokens"], "tokens reused")
