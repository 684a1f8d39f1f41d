"""The weights of the channels in each step's total: schedules, and the gate of the teacher."""

from collections.abc import Mapping
from typing import Any

from composer_mesh.actors.learning.running_means import RunningMeans
from composer_mesh.actors.learning.schedules import channel_weight
from composer_mesh.actors.learning.teacher_advantage import ADVANTAGE, WINS
from composer_mesh.channels.step import POLICY
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import StepBatch

FOLLOWED = ("success", "agreement")


class ChannelWeights:
    """Computes the weights; a step's own measurements count from the next step on."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._means = RunningMeans()

    def of(self, step: int) -> dict[str, float]:
        """Return the weight of each channel in a step (0-based), in the order of their losses."""
        followed = {name: self._means[name] for name in FOLLOWED}
        found = {POLICY: 1.0} | {
            name: channel_weight(one.peak, one.schedule, step, self._config.run.steps, followed)
            for name, one in self._config.weighted_channels.items()
        }
        return found if self._teaches() else found | {"sdpo": 0.0}

    def finish_step(self, batch: StepBatch, figures: Mapping[str, float]) -> dict[str, float]:
        """Take a step's measurements; return the metrics of what its weights followed."""
        found = self._metrics()
        self._means.note(
            {
                "success": batch.success,
                "agreement": batch.agreement,
                "advantage": figures.get(ADVANTAGE),
                "advantage_wins": figures.get(WINS),
            }
        )
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return self._means.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self._means.load_state_dict(state)

    def _teaches(self) -> bool:
        """Whether the teacher's running advantage lets the SDPO channel train; unknown, it does."""
        for name, least in self._bounds().items():
            known = self._means[name]
            if known is not None and known < least:
                return False
        return True

    def _bounds(self) -> dict[str, float]:
        """Return the lowest running means with which the SDPO channel trains."""
        sdpo = self._config.sdpo
        found = {"advantage": sdpo.min_advantage, "advantage_wins": sdpo.min_advantage_wins}
        return {name: least for name, least in found.items() if least is not None}

    def _metrics(self) -> dict[str, float]:
        sdpo = self._config.sdpo
        gated = sdpo.on and sdpo.is_gated
        used = list(self._bounds()) if sdpo.on else []
        used += [one.schedule.by for one in self._config.weighted_channels.values() if one.on]
        known = {name: self._means[name] for name in dict.fromkeys(used) if name != "steps"}
        found = {f"running/{name}": value for name, value in known.items() if value is not None}
        return found | ({"sdpo/gate": float(self._teaches())} if gated else {})
