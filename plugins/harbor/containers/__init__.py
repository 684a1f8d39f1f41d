"""Containers behind one port: boxes without a daemon, Podman and Docker."""
