"""The builtin teachers: rules with stated error rates, behind HTTP."""
