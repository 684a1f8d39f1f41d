"""What the experiment trackers register: names and import paths, by kind (docs/plugins.md)."""

_FOLDER = "composer_mesh.plugins.trackers"

TABLE = {
    "trackers": {
        "tensorboard": f"{_FOLDER}.experiments:TensorboardTracker",
        "wandb": f"{_FOLDER}.experiments:WandbTracker",
        "mlflow": f"{_FOLDER}.experiments:MlflowTracker",
        "trackio": f"{_FOLDER}.experiments:TrackioTracker",
        "prometheus": f"{_FOLDER}.to_prometheus:PrometheusTracker",
        "opentelemetry": f"{_FOLDER}.to_opentelemetry:OpentelemetryTracker",
    },
}
