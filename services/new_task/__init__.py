"""`composer-mesh new-task`: a new package with a runnable task, from the files in `template`."""
