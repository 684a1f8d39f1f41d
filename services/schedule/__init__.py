"""What the controller schedules with: groups under way, steps composed of them, when it stops."""
