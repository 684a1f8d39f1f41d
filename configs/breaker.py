"""Circuit breaker for model endpoints that keep failing."""

from composer_mesh.configs.base import Count, Seconds, Section


class BreakerConfig(Section):
    """Circuit breaker for a model that keeps failing."""

    failures: Count = 5
    """Consecutive failed requests after which the model is suspended."""

    rest_s: Seconds = 30.0
    """Seconds of suspension until one request tests the model again."""
