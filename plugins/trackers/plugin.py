"""What the experiment trackers register: names and import paths, by kind (docs/plugins.md)."""

_FOLDER = "composer_mesh.plugins.trackers"

TABLE = {
    "trackers": {
        "tensorboard": f"{_FOLDER}.to_tensorboard:TensorboardTracker",
        "wandb": f"{_FOLDER}.to_wandb:WandbTracker",
        "mlflow": f"{_FOLDER}.to_mlflow:MlflowTracker",
        "trackio": f"{_FOLDER}.to_trackio:TrackioTracker",
        "prometheus": f"{_FOLDER}.to_prometheus:PrometheusTracker",
        "opentelemetry": f"{_FOLDER}.to_opentelemetry:OpentelemetryTracker",
    },
}
