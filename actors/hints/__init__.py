"""LLM-written hints: a cache, then a provider within the budget."""
