"""Tasks of many calls, all of which have to be right: rewards are rare."""
