"""A run as a person sees it: pages, tables, the tree of its actors, their stacks."""
