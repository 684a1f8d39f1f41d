"""The section `[sft]`: supervised fine-tuning by `composer-mesh sft`, before `train`."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from composer_mesh.configs.base import (
    Count,
    CountOrZero,
    FreeTable,
    Positive,
    Section,
    Share,
)
from composer_mesh.configs.channels import Decay
from composer_mesh.configs.hub import DataPath


class SftConfig(Section):
    """Supervised fine-tuning on conversations; its trainer is that of [trainer]."""

    steps: Count
    """Supervised optimizer steps; run.steps are those of `train`."""

    batch_size: Annotated[int, Field(ge=1, le=100_000)] = 16
    """Conversations per optimizer step."""

    lr: Positive = 2e-5
    """Peak learning rate."""

    lr_schedule: Decay = "linear"
    """Decay of the learning rate from its peak to the last step."""

    warmup_steps: CountOrZero = 0
    """Steps over which the learning rate rises from 0 to its peak."""

    path: DataPath | None = None
    """Rows with `messages`, or with `prompt` and `completion`. They are in a .jsonl, .json or
    .parquet file, or in a folder that datasets.save_to_disk wrote, relative to the working
    directory. Or the id of a dataset as in data.path; its splits test and validation are left
    out."""

    demonstrations: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Number of training episodes that the task's expert demonstrates."""

    options: FreeTable = Field(default_factory=dict)
    """Keyword arguments of the task's class in place of the same ones of data.options, such as the
    part of its rows that is demonstrated."""

    error_rate: Share = 0.0
    """Share of demonstrated actions that are deliberately wrong; they are imitated too."""

    recovery_rate: Share = 0.5
    """Share of wrong actions after which the demonstration continues with the correct one."""

    hinted_share: Share = 0.0
    """Share of demonstrations with a hint in place of a wrong action."""

    def _problems(self) -> Iterator[str]:
        if self.path is None and not self.demonstrations:
            yield (
                "path is not set and demonstrations is 0, so there is nothing to imitate: set "
                "sft.path to a file of conversations, or sft.demonstrations to a number of episodes"
            )
        if not self.demonstrations and (self.error_rate or self.hinted_share):
            yield (
                "error_rate or hinted_share is set but demonstrations is 0: they are about "
                "demonstrations alone, so remove them or set sft.demonstrations"
            )
        if self.hinted_share and not self.error_rate:
            yield (
                f"hinted_share is {self.hinted_share} but error_rate is 0, and a hint replaces a "
                "wrong action: set sft.error_rate above 0, or remove sft.hinted_share"
            )
