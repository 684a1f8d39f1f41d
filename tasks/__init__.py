"""What agents are trained on: the public classes of tasks, and the tasks that ship."""
