"""What limits 8, 64 and 512 GPUs first, computed from costs that were measured on fewer.

    python benchmarks/scale.py [--config FILE] [--price USD] [--json FILE]

Nothing is run. Costs of the controller, store, weights and signals are those of this project's own
benchmarks (docs/scale.md names each), on two CPU cores and one GPU; the links are data sheets'.
Rollouts grow with the GPUs, so that each GPU has the same work in a step.
"""

from dataclasses import dataclass
from pathlib import Path

from report import Report, arguments

from composer_mesh.configs.load import load_config
from composer_mesh.planning.memory import GB
from composer_mesh.planning.model_sizes import cache_numbers, parameter_count, sizes_of

PRESETS = Path(__file__).parents[1] / "configs"
GPUS = (8, 64, 512)
GPUS_OF_A_HOST = 8

CONTROLLER_S_A_TURN = 0.058e-3
CONTROLLER_S_A_TOKEN = 2e-3 / 40_000
"""Lists of a stored trace: 2 ms for 40,000 tokens."""
CONTROLLER_SHARE_A_PROCESS = 0.35e-3
"""Monarch's threads: seconds of CPU a second for each process of the mesh."""
WORKER_S_A_TURN = 1.89e-3
STORE_TOKENS_A_S = 6.5e6
MATRIX_FLOPS = 767e12
TRAINER_SHARE = 0.41
"""Of the matrix limit, by the FSDP2 step of 22 layers on one H200."""
ALL_CHANNELS = 7_843 / 5_754
"""Time of a step with all three channels over that of GRPO alone."""
TCP_BYTES_A_S = 1.4 * GB
"""Of one receiver by Monarch's RDMA over TCP: 2 GB in 1.36 s."""
HOST_RECOVERY_S = 35.0
ANSWERS_A_ROLLOUT = 1_139 / (16 * 48)

MEMORY_BYTES_A_S = 4_250 * GB
LINK_BYTES_A_S = 50 * GB
"""One port of 400 Gbit/s for each GPU, by its data sheet."""
DECODE_SHARE = 0.5
"""Assumed share of the memory bound that vLLM reaches; not measured here."""
GPU_HOURS_A_FAILURE = 16_384 * 54 * 24 / 419
"""Unexpected interruptions of a published pretraining run (Llama 3, section 3.3.4)."""


TRAINED_BYTES = 16
"""Of a parameter with its gradient and AdamW's state, divided by the GPUs that train."""
GPU_BYTES = 64 * GB
"""Of a GPU of 80 GB, without what activations take."""


@dataclass(frozen=True)
class Work:
    """One step's work for each GPU."""

    rollouts: int = 32
    turns: int = 5
    tokens: int = 4_000
    """Of one rollout, with its prompt and what tools answer."""
    sampled: int = 1_500
    hinted: int = 150
    """Tokens of one rollout that the SDPO teacher scores."""


@dataclass(frozen=True)
class Model:
    """What a model costs: bytes are those of bfloat16."""

    parameters: int
    cache_bytes: int
    """Of one token."""
    width: int
    engine_gpus: int
    """GPUs that serve one copy of the policy."""


def model_of(config: Path) -> Model:
    """Return the model of a preset, whose folder need not be there."""
    loaded = load_config(config, ["data.path=openai/gsm8k:main"], model_later=True)
    sizes = sizes_of(loaded.policy)
    return Model(
        parameter_count(sizes),
        2 * cache_numbers(sizes),
        sizes.hidden_size,
        loaded.generator.vllm.tensor_parallel,
    )


def step_of(model: Model, work: Work, gpus: int) -> dict[str, float]:
    """Return the seconds of each part of a step; half of the GPUs train, half generate.

    Parts overlap, so that the longest of them is the step of an asynchronous run.
    `controller` and `store` are threads of one Python process, so their sum is that of one core.
    """
    rollouts, training = work.rollouts * gpus, gpus // 2
    engines = max(1, (gpus - training) // model.engine_gpus)
    rows = rollouts / engines
    weights = 2 * model.parameters
    read = weights + rows * model.cache_bytes * work.tokens / 2
    parts = {
        "train": ALL_CHANNELS * 6 * model.parameters * rollouts * work.tokens
        / (training * MATRIX_FLOPS * TRAINER_SHARE),
        "generate": work.sampled * read / (DECODE_SHARE * MEMORY_BYTES_A_S * model.engine_gpus),
        "weights, TCP": weights / TCP_BYTES_A_S,
        "weights, RDMA": weights * max(1 / LINK_BYTES_A_S, engines / (training * LINK_BYTES_A_S)),
        "signals, TCP": rollouts * work.hinted * 2 * model.width / (training * TCP_BYTES_A_S),
    }  # fmt: skip
    seconds = max(parts["train"], parts["generate"])
    processes = training + engines + gpus / GPUS_OF_A_HOST * 4
    controller = (
        rollouts * (work.turns * CONTROLLER_S_A_TURN + work.tokens * CONTROLLER_S_A_TOKEN)
        + processes * CONTROLLER_SHARE_A_PROCESS * seconds
    )
    store = rollouts * work.tokens / STORE_TOKENS_A_S
    failures = seconds * gpus / 3600 / GPU_HOURS_A_FAILURE
    return parts | {
        "controller": controller,
        "store": store,
        "rollout workers, cores": rollouts * work.turns * WORKER_S_A_TURN / seconds,
        "step": seconds,
        "hours between failures": seconds / 3600 / failures,
        "recovery, share": failures * (HOST_RECOVERY_S + seconds) / seconds,
        "controller and store, share": (controller + store) / seconds,
    }


def experiment(
    model: Model, work: Work, gpus: int, price: float, answer: float
) -> tuple[float, float]:
    """Return GPU-hours and dollars of four arms with three seeds and 100 steps each.

    Two of the four arms query the teachers.
    """
    hours = 4 * 3 * 100 * step_of(model, work, gpus)["step"] * gpus / 3600
    answers = 2 * 3 * 100 * work.rollouts * gpus * ANSWERS_A_ROLLOUT
    return hours, hours * price + answers * answer


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--config", type=Path, help="a preset's model (default: 8B and 32B)")
    parser.add_argument("--price", type=float, default=2.5, help="dollars a GPU-hour (2.5)")
    parser.add_argument("--answer", type=float, default=0.005, help="dollars an answer (0.005)")
    options = parser.parse_args()
    report, work = Report("scale"), Work()
    chosen = [options.config] if options.config else [
        PRESETS / "qwen3-8b.toml", PRESETS / "qwen3-32b.toml"
    ]  # fmt: skip
    for config in chosen:
        model = model_of(config)
        fitting = [one for one in GPUS if 2 * TRAINED_BYTES * model.parameters <= one * GPU_BYTES]
        columns = {gpus: step_of(model, work, gpus) for gpus in fitting}
        rows = [
            [part, *(f"{columns[gpus][part]:.3g}" for gpus in fitting)]
            for part in columns[fitting[0]]
        ]
        report.print_table(
            f"{config.stem}: seconds of a step, {work.rollouts} rollouts for each GPU",
            ["", *(f"{gpus} GPUs" for gpus in fitting)],
            rows,
        )
        for gpus in fitting:
            for part, value in columns[gpus].items():
                report.figures[f"{config.stem}/{gpus}/{part}"] = value
        hours, dollars = experiment(model, work, 32, options.price, options.answer)
        print(
            f"four arms, three seeds, 100 steps on 32 GPUs: {hours:,.0f} GPU-hours, ${dollars:,.0f}"
        )
        report.figures[f"{config.stem}/experiment/gpu_hours"] = hours
        report.figures[f"{config.stem}/experiment/usd"] = dollars
    report.finish(options.json)


if __name__ == "__main__":
    main()
