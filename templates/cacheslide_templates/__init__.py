"""Prompt templates of agents, as data; `PromptTemplate.named` reads them."""
