"""Launching a run on its hosts: launchers by kind of cluster, handles, following and stopping."""
