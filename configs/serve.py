"""Limits of a training server: models, requests and what is kept, for `composer-mesh serve`."""

from typing import Annotated

from pydantic import Field

from composer_mesh.configs.base import Count, Gigabytes, Positive, Seconds, Section

MOST_MODELS = 10_000
Megabytes = Annotated[float, Field(gt=0, le=1_000_000)]


class ServeConfig(Section):
    """A server of the Tinker protocol; ignored by runs."""

    base_model: Annotated[str, Field(max_length=200)] = ""
    """Name by which clients request the policy; if empty, its id on a hub, or else the run's
    name."""
    tokenizer: Annotated[str, Field(max_length=1000)] = ""
    """Where clients load their tokenizer from; if empty, the policy's id on a hub, or else, on
    loopback, its folder."""
    full_weights: bool = False
    """Train all weights of one model of one client, in place of adapters of many."""
    lora_alpha: Positive = 32.0
    """Scale of adapters: their product is multiplied by lora_alpha / rank."""
    max_rank: Annotated[int, Field(ge=1, le=4096)] = 128
    """Largest rank of an adapter."""
    max_models: Annotated[int, Field(ge=1, le=MOST_MODELS)] = 1000
    """Models of all clients together, idle ones included."""
    max_models_per_client: Annotated[int, Field(ge=1, le=MOST_MODELS)] = 100
    """Models of one client."""
    max_sessions: Count = 50_000
    """Sessions of all clients."""
    max_sessions_per_client: Count = 10_000
    """Sessions of one client."""
    session_idle_s: Seconds = 86_400.0
    """Seconds without a request or heartbeat after which a session and its samplers are freed; its
    models stay."""
    max_samplers: Count = 50_000
    """Samplers of all clients."""
    max_samplers_per_client: Count = 10_000
    """Samplers of one client."""
    max_saved_per_client: Count = 10_000
    """Saved weights of one client."""
    max_saved_gb: Gigabytes = 1000.0
    """Size of all clients' saved weights with a name."""
    max_saved_gb_per_client: Gigabytes = 250.0
    """Size of one client's saved weights with a name."""
    models_in_memory: Annotated[int, Field(ge=1, le=MOST_MODELS)] = 64
    """Models that the trainer holds at once; idle ones are moved to disk and loaded again when
    needed."""
    snapshots_in_memory: Annotated[int, Field(ge=1, le=MOST_MODELS)] = 8
    """Snapshots that a generator holds at once, each with its own cache of keys and values."""
    save_every: Count = 20
    """Optimizer steps of a model after which its state is written. When a trainer was lost, those
    since then are repeated from the log of operations."""
    keep_operations: bool = False
    """Keep the data of operations that a written state includes, for an audit that repeats all of
    them."""
    unnamed_kept: Annotated[int, Field(ge=1, le=100_000)] = 100
    """Snapshots without a name of one model that are kept for samplers; older ones are deleted."""
    max_open_operations: Count = 10_000
    """Unanswered operations of all clients."""
    max_open_per_client: Count = 2000
    """Unanswered operations of one client; further ones must be sent again later."""
    max_open_mb: Megabytes = 4096.0
    """Data of all clients' unanswered operations, in the log, in megabytes."""
    max_open_mb_per_client: Megabytes = 512.0
    """Data of one client's unanswered operations, in megabytes."""
    max_repeated_mb: Megabytes = 64.0
    """Data of one model's operations since its written state, in megabytes. Above it the state is
    written before `save_every` steps; the log keeps the data for models_in_memory models."""
    batched_models: Annotated[int, Field(ge=1, le=1024)] = 16
    """Models whose operations are computed in one forward, where their shapes allow it."""
    max_request_mb: Annotated[float, Field(gt=0, le=1024)] = 32.0
    """Size of a request's body in megabytes."""
    max_data: Annotated[int, Field(ge=1, le=100_000)] = 1024
    """Sequences of one operation."""
    max_samples: Annotated[int, Field(ge=1, le=10_000)] = 128
    """Samples of one request."""
    max_top_k: Annotated[int, Field(ge=1, le=10_000)] = 100
    """Most probable tokens, or targets, at one position."""
    result_s: Seconds = 3600.0
    """Seconds that a result is kept for its client."""
    max_results_gb: Gigabytes = 4.0
    """Size of all kept results; the oldest are dropped first."""
    max_results_gb_per_client: Gigabytes = 1.0
    """Size of one client's kept results; its oldest are dropped first."""
    gap_s: Seconds = 60.0
    """Seconds that an operation waits for earlier ones of its model that were not received."""
