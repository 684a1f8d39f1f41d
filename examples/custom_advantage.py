"""Advantages of your own: among rollouts that solve a task, the shorter ones count as better.

Only what a rollout earned can be taken away for its length, so a wrong answer gains nothing by
being short. Use it from the repository root with

    composer-mesh train configs/quickstart.toml --set advantage.type=custom \\
        --set advantage.import_path=examples.custom_advantage.brief_advantage --set run.steps=3 \\
        --set run.import_paths='["."]'
"""

import torch

from composer_mesh import AdvantageInputs, AdvantageOutputs


def brief_advantage(inputs: AdvantageInputs, penalty: float = 0.2) -> AdvantageOutputs:
    """Length-penalized rewards against the mean of their group.

        l = (tokens - fewest) / (most - fewest), within the group
        A = r (1 - penalty l) - mean of that over the group

    A group of one length is left as it is: then A = r - mean.
    """
    rewards = torch.tensor([[each["reward"] for each in group] for group in inputs.rollouts])
    tokens = torch.tensor([[each["completion_len"] for each in group] for group in inputs.rollouts])
    fewest, most = tokens.amin(-1, keepdim=True), tokens.amax(-1, keepdim=True)
    relative = (tokens - fewest) / (most - fewest).clamp(min=1)
    shaped = rewards * (1 - penalty * relative)
    return AdvantageOutputs(shaped - shaped.mean(-1, keepdim=True))
