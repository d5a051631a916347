"""Template in, aligned tokens out: templates, chat rendering, tokens, alignment."""
