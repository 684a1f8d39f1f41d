"""Launchers by kind of cluster, imported on demand."""

from __future__ import annotations

from composer_mesh.configs.cluster import ClusterKind
from composer_mesh.services.launch.ports import Launcher


def launcher_of(kind: ClusterKind) -> Launcher:
    """Return the launcher of a kind."""
    if kind == "local":
        from composer_mesh.services.launch.local import LocalLauncher

        return LocalLauncher()
    if kind == "hosts":
        from composer_mesh.services.launch.by_ssh import HostsLauncher

        return HostsLauncher()
    if kind == "slurm":
        from composer_mesh.services.launch.slurm.launcher import SlurmLauncher

        return SlurmLauncher()
    from composer_mesh.services.launch.kubernetes.launcher import KubernetesLauncher

    return KubernetesLauncher()
