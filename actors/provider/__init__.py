"""A client of the OpenAI chat protocol: limits, retries, circuit breaker, costs, API keys."""
