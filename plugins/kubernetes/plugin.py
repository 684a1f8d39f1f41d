"""What Kubernetes registers: names and import paths, by kind (docs/plugins.md)."""

TABLE = {
    "launchers": {
        "kubernetes": "composer_mesh.plugins.kubernetes.launcher:KubernetesLauncher",
    },
}
