"""Plugin of verl (entry point `verl.plugins`): registers the names that its configs may use.

    algorithm.adv_estimator = grpo_composer
    actor_rollout_ref.actor.policy_loss.loss_mode = composer_grpo | composer_cispo | composer_dppo
    actor_rollout_ref.rollout.agent.default_agent_loop = composer_mesh

verl logs the error of a plugin that fails at level debug and continues without it: where one of the
names is unknown, `import composer_mesh.plugins.frameworks.verl.plugin` tells why.
"""

from __future__ import annotations

from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

from composer_mesh.plugins.frameworks.verl.agent_loop import AGENT_LOOP, TaskAgentLoop, agent_loops
from composer_mesh.plugins.frameworks.verl.algorithms import ESTIMATOR, POLICY_LOSSES, grpo_composer

register_adv_est(ESTIMATOR)(grpo_composer)
for _name, _loss in POLICY_LOSSES.items():
    register_policy_loss(_name)(_loss)
agent_loops().setdefault(
    AGENT_LOOP, {"_target_": f"{TaskAgentLoop.__module__}.{TaskAgentLoop.__qualname__}"}
)
