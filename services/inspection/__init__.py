"""Terminal views of a run: live page, tables, actor tree and Python stacks."""
