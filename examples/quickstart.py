"""Two trials of one question: the second reuses what the first computed. In the README too."""

from langchain_cacheslide import ChatCacheSlide, TemplateRunnable

chain = TemplateRunnable.named("reflexion") | ChatCacheSlide(model="smollm2-135m", max_tokens=16)
values = {
    "examples": [{"question": "In which country is Lyon?", "answer": "France"}],
    "paragraphs": [{"title": "Ada Lovelace", "text": "Lovelace worked with Charles Babbage."}],
    "question": "With whom did Ada Lovelace work?",
}
chain.invoke({**values, "reflections": []})
answer = chain.invoke({**values, "reflections": ["I gave a date. I will give a name."]})
receipt = answer.response_metadata["cacheslide"]
print(receipt["outcome"], receipt["reused_tokens"], "of", receipt["prompt_tokens"], "tokens reused")
