"""The builtin teachers: rule-based experts with configured error rates, served over HTTP."""
