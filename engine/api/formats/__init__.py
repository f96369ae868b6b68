"""How a model talks: conversations into prompts, generated text back into content, reasoning and tool calls."""
