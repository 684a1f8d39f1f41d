"""One client of the OpenAI chat protocol: limits, retries, breaker, money, keys."""
