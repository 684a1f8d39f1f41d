"""Where hints are worded: a cache, then a provider while the budget lasts."""
