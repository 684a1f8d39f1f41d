"""Cost of a checkpoint: the copy that training waits for, and the concurrent write.

    python benchmarks/checkpoint.py [--quick] [--json FILE]

One trainer rank with a model of random weights, without processes: the step that a run makes, the
copy that its trainer waits for, and the write in a thread concurrent with the next step.
`stall_over_step` is the copy's share of a step; a run pays it once in `trainer.checkpoint_every`
steps. The first copy also allocates the memory that all later ones use; it is shown, but not in the
ratio.
"""

import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from measuring import policy_step, random_sequences
from report import Report, arguments

from composer_mesh.actors.checkpoints.folder import CheckpointDraft, prune
from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.policy import build_model, build_tokenizer, save_policy
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import StepBatch

MB = 1e6
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "layers": 8, "heads": 8, "head_dim": 64}
QUICK = SIZES | {"layers": 2}
SEQUENCES, TOKENS = 16, 256


@dataclass(frozen=True)
class Costs:
    """Seconds of one round: a step, the copy, a step during the write, the write itself."""

    step_s: float
    stall_s: float
    beside_s: float
    write_s: float


def config(sizes: dict[str, int]) -> Config:
    """Return a run of the policy channel only, with steps of the given sizes."""
    policy = {**sizes, "kv_heads": sizes["heads"], "vocab_size": 8192, "max_context": TOKENS}
    return Config.model_validate(
        {
            "run": {"name": "checkpoint", "seed": 1, "steps": 1000},
            "data": {"task": "toolbox"},
            "policy": policy,
            "trainer": {"microbatch_tokens": 4 * TOKENS},
            "sdpo": {"alpha": 0.0},
            "replay": {"beta": 0.0},
        }
    )


def batch(step: int) -> StepBatch:
    """Return a step of which all tokens but the first of each sequence are trained."""
    return policy_step(random_sequences(SEQUENCES, TOKENS, 300), TOKENS - 1, step)


def one_round(learner: Learner, root: Path) -> Costs:
    """Train a step alone, copy, and train a step during the write of the copy."""
    began = time.perf_counter()
    learner.train(batch(learner.version), None)
    stepped = time.perf_counter()
    draft = CheckpointDraft(root, learner.version)
    learner.copy()
    copied = time.perf_counter()
    wrote: list[float] = []

    def write() -> None:
        draft.commit(learner.write(draft.folder))
        wrote.append(time.perf_counter() - copied)

    thread = threading.Thread(target=write)
    thread.start()
    learner.train(batch(learner.version), None)
    during = time.perf_counter() - copied
    thread.join()
    prune(root, keep=1)
    return Costs(stepped - began, copied - stepped, during, wrote[0])


def folder_of(root: Path, settings: Config) -> Path:
    """Return the folder of an initial policy with random weights."""
    tokenizer = build_tokenizer([" ".join(dir(torch))] * 2, settings.policy.vocab_size)
    save_policy(build_model(settings.policy, tokenizer, 1), tokenizer, root / "policy")
    return root / "policy"


def main() -> None:
    parser = arguments("What a checkpoint costs a step")
    given = parser.parse_args()
    torch.set_num_threads(1)
    settings, rounds = config(QUICK if given.quick else SIZES), 3 if given.quick else 6
    with TemporaryDirectory(prefix="checkpoint-") as name:
        root = Path(name)
        learner = Learner(settings, folder_of(root, settings), Ranks())
        first, *rest = [one_round(learner, root) for _ in range(rounds)]
        files = [path for path in (root / "checkpoints").rglob("*") if path.is_file()]
        written = sum(path.stat().st_size for path in files)
    names = ("step_s", "stall_s", "beside_s", "write_s")
    middle = Costs(*(statistics.median(getattr(one, name) for one in rest) for name in names))
    report = Report("checkpoint")
    report.figures = {
        "parameters": sum(one.numel() for one in learner.model.parameters()),
        "bytes_written": written,
        "first_stall_s": first.stall_s,
        **{name: getattr(middle, name) for name in names},
    }
    report.ratios = {
        "stall_over_step": middle.stall_s / middle.step_s,
        "beside_over_step": middle.beside_s / middle.step_s,
    }
    report.print_table(
        f"A checkpoint of {written / MB:.0f} MB, model folder included",
        ("", "seconds"),
        [
            ("a step", f"{middle.step_s:.3f}"),
            ("the copy that training waits for", f"{middle.stall_s:.3f}"),
            ("the first copy", f"{first.stall_s:.3f}"),
            ("the write, during a step", f"{middle.write_s:.3f}"),
            ("a step during the write", f"{middle.beside_s:.3f}"),
        ],
    )
    report.finish(given.json)


if __name__ == "__main__":
    main()
