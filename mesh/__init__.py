"""Processes, remote calls and transfer of bytes. Independent of training and tasks."""
