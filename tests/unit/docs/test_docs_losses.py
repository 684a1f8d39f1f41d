"""The guide to the losses says what is: its code runs, its settings parse, its names exist."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from guides import QUICKSTART, ROOT, Guide, as_a_run, names_in_code

from composer_mesh.configs.advantages import CustomAdvantage
from composer_mesh.configs.load import load_config
from composer_mesh.configs.losses import CustomLoss
from composer_mesh.losses import policy
from composer_mesh.losses.custom import LossInputs, custom_advantages, custom_policy_loss
from composer_mesh.losses.custom_function import check_signature, load_function
from composer_mesh.services.cli import main

GUIDE = Guide.read("losses.md")
CONTENTS = (
    "policy",
    "advantages",
    "distillation",
    "preference",
    "fused",
    "custom",
)
"""Modules whose public functions are what the guide is a guide to."""

THEIRS = {
    "agg_loss",
    "aot_unpaired",
    "apply_clamp",
    "behav_imp_weight_cap",
    "gamma_beta_ratio",
    "generalized_jsd_loss",
    "kl_penalty",
    "nca_pair",
    "sppo_hard",
    "token_clip",
}
"""Names of upstream code and options that the guide speaks about."""

PARTS = {
    "aggregate",
    "aggregation_normalizer",
    "check_linear",
    "check_needs",
    "check_signature",
    "divergence_terms",
    "entropy",
    "entropy_opd_from_logprobs",
    "importance_weights",
    "kl_terms",
    "linear_logits",
    "load_function",
    "row_logprobs",
    "sum_dtype",
}
"""Functions that others are made of; the guide may leave them out."""


def manifests() -> list[list[str]]:
    """Each recipe's overrides, as they are typed after --set."""
    table = GUIDE.text.split("### Published recipes")[1].split("## Advantages")[0]
    rows = [row.split("|")[2] for row in table.splitlines() if row.startswith("|")]
    found = [re.findall(r"`([^`]+)`", row) for row in rows]
    return [settings for settings in found if settings and "=" in settings[0]]


@pytest.fixture
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from the repository root: `examples` can be imported."""
    monkeypatch.syspath_prepend(str(ROOT))


def test_the_guide_has_code_settings_and_recipes() -> None:
    assert len(GUIDE.blocks("python")) >= 3
    assert len(GUIDE.blocks("toml")) >= 1
    assert len(manifests()) >= 10


@pytest.mark.parametrize("text", GUIDE.blocks("toml"))
def test_every_toml_block_is_a_part_of_a_run(text: str, at_the_root: None) -> None:
    config = as_a_run(text)
    for section in (config.loss, config.advantage):
        if isinstance(section, CustomLoss | CustomAdvantage):
            path = section.import_path
            check_signature(load_function(path), path, section.kwargs)


@pytest.mark.parametrize("overrides", manifests(), ids=" ".join)
def test_every_recipe_resolves_and_changes_the_run(overrides: list[str]) -> None:
    assert load_config(QUICKSTART, overrides) != load_config(QUICKSTART)


def test_every_name_in_the_guide_exists() -> None:
    sides = ("input_ids", "response_mask", "ref_logprobs")
    keys = {f"dpo_chosen_{part}" for part in sides}
    assert GUIDE.names() - names_in_code() - THEIRS - keys == set()


def modules() -> list[Any]:
    return [importlib.import_module(f"composer_mesh.losses.{name}") for name in CONTENTS]


def test_every_public_function_is_in_the_guide() -> None:
    named = {word for code in GUIDE.inline() for word in re.findall(r"\w+", code)}
    public = {
        name
        for module in modules()
        for name, each in vars(module).items()
        if inspect.isfunction(each)
        and not name.startswith("_")
        and (name in getattr(module, "__all__", ()) or each.__module__ == module.__name__)
    }
    assert public - PARTS - named == set()


def test_the_error_in_the_guide_is_the_one_that_check_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    shown = GUIDE.blocks("text")[0].splitlines()
    head = ["from composer_mesh import LossInputs, LossOutputs", "", ""]
    source = [*head, "def my_loss(inputs: LossInputs) -> LossOutputs:", shown[1]]
    (tmp_path / "my_loss.py").write_text("\n".join(source) + "\n")
    settings = ("loss.type=custom", "loss.import_path=my_loss.my_loss")
    paths = f"run.import_paths={json.dumps([str(tmp_path)])}"
    words = [word for one in (*settings, paths) for word in ("--set", one)]
    assert main(["check", "quickstart", *words]) == 2
    said = capsys.readouterr().err.replace(str(tmp_path), "/home/me")
    assert said.splitlines() == shown


NOW = (-3 * torch.rand(4, 7, generator=torch.Generator().manual_seed(1))).requires_grad_()
ADVANTAGES = torch.tensor([1.0, -2.0, 0.5, -0.5])
ON_POLICY: list[tuple[Any, dict[str, Any]]] = [
    (policy.grpo_loss, {"clip_high": 0.28}),
    (policy.grpo_loss, {"clip_low": 0.01, "clip_high": 0.01, "ratio_cap": 3.0}),
    (policy.grpo_loss, {"ratio_level": "sequence"}),
    (policy.grpo_loss, {"ratio_level": "sequence_token"}),
    (policy.gmpo_loss, {"aggregation": "dapo"}),
    (policy.vespo_loss, {}),
    (policy.cispo_loss, {}),
    (policy.sapo_loss, {"aggregation": "dapo", "tau_positive": 3.0}),
    (policy.prime_rl_loss, {}),
    (policy.prime_rl_ipo_loss, {}),
    (policy.dppo_loss, {}),
    (policy.dppo_loss, {"divergence": "ratio"}),
    (policy.dppo_loss, {"divergence": "kl"}),
]


def gradient(loss: policy.PolicyLoss) -> torch.Tensor:
    return torch.autograd.grad(loss.loss, NOW)[0]


@pytest.mark.parametrize(("function", "options"), ON_POLICY)
def test_where_every_ratio_is_1_all_types_have_the_gradient_of_reinforce(
    function: Any, options: dict[str, Any]
) -> None:
    mask = NOW < -0.5
    found = gradient(function(NOW, NOW.detach(), ADVANTAGES, mask, normalizer=9, **options))
    expected = gradient(policy.reinforce_loss(NOW, ADVANTAGES, mask, normalizer=9))
    torch.testing.assert_close(found, expected)


def test_around_the_policy_of_the_forward_the_clips_of_decoupled_ppo_change_nothing() -> None:
    mask, sampler = NOW < -0.5, NOW.detach() - torch.linspace(-2, 2, 28).view(4, 7)
    shared: dict[str, Any] = {"normalizer": 9, "rejection": policy.Rejection()}
    settings: list[dict[str, Any]] = [{}, {"clip_low": 0.01, "clip_high": 0.01, "dual_clip": 1.1}]
    one, other = (
        policy.decoupled_ppo_loss(NOW, NOW.detach(), sampler, ADVANTAGES, mask, **shared, **clips)
        for clips in settings
    )
    torch.testing.assert_close(gradient(one), gradient(other))


def a_sequence(
    trainer: list[float], sampler: list[float], *, advantage: float, mask: list[bool] | None = None
) -> LossInputs:
    return LossInputs(
        trainer_logprobs=torch.tensor(trainer, requires_grad=True),
        inference_logprobs=torch.tensor(sampler),
        ref_logprobs=None,
        advantages=torch.full((len(trainer),), advantage),
        loss_mask=torch.tensor(mask or [True] * len(trainer)),
    )


def test_the_custom_loss_drops_falls_sooner_than_rises_and_halves_what_is_negative(
    at_the_root: None,
) -> None:
    loss_of = load_function("examples.custom_loss.asymmetric_loss")
    # Probabilities 0.5 -> 0.6 and 0.5 -> 0.4: a move of 0.1, within mask_high and beyond mask_low.
    before, up, down = [torch.tensor(0.5).log().item()], [-0.5108256], [-0.9162907]
    rising = a_sequence(up, before, advantage=2.0)
    falling = a_sequence(down, before, advantage=-2.0)
    near = a_sequence(before, before, advantage=-2.0)
    found = [
        custom_policy_loss(loss_of, "the loss", {}, [each], normalizer=1)
        for each in (rising, falling, near)
    ]
    assert [loss.item() for loss, _ in found] == pytest.approx([-2.4, 0.0, 1.0], rel=1e-5)
    assert [metrics["dropped"].mean for _, metrics in found] == [0.0, 1.0, 0.0]
    assert found[0][1]["probability_moved"].mean == pytest.approx(0.1, rel=1e-5)


def test_the_custom_loss_without_its_asymmetry_is_prime_rls(at_the_root: None) -> None:
    loss_of = load_function("examples.custom_loss.asymmetric_loss")
    rng = torch.Generator().manual_seed(0)
    trainer = (-2 * torch.rand(3, 9, generator=rng)).requires_grad_()
    sampler, mask = -2 * torch.rand(3, 9, generator=rng), torch.rand(3, 9, generator=rng) < 0.7
    advantages = torch.tensor([1.5, -0.5, -1.0])
    sequences = [
        LossInputs(trainer[row], sampler[row], None, advantages[row].expand(9), mask[row])
        for row in range(3)
    ]
    kwargs = {"mask_low": 0.2, "mask_high": 0.2, "negative_weight": 1.0}
    custom, _ = custom_policy_loss(loss_of, "the loss", kwargs, sequences, normalizer=7)
    built_in = policy.prime_rl_loss(trainer, sampler, advantages, mask, normalizer=7, kl_tau=0).loss
    torch.testing.assert_close(custom, built_in)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss, trainer)[0] for loss in (custom, built_in))
    )


def test_the_custom_advantage_prefers_the_shorter_of_two_right_answers(at_the_root: None) -> None:
    advantages_of = load_function("examples.custom_advantage.brief_advantage")
    rewards, lengths = [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]], [[10, 30, 5], [8, 8, 8]]
    groups = [
        [{"reward": r, "completion_len": n} for r, n in zip(*group, strict=True)]
        for group in zip(rewards, lengths, strict=True)
    ]
    first, second = custom_advantages(advantages_of, "the advantage", {"penalty": 0.5}, groups)
    # Lengths 0.2, 1 and 0 of the way from fewest to most: rewards 0.9, 0.5 and 0.
    shaped = torch.tensor([0.9, 0.5, 0.0])
    torch.testing.assert_close(first, shaped - shaped.mean())
    torch.testing.assert_close(second, torch.tensor([2 / 3, -1 / 3, -1 / 3]))


def test_the_custom_advantage_takes_groups_of_unequal_size(at_the_root: None) -> None:
    advantages_of = load_function("examples.custom_advantage.brief_advantage")
    groups = [[{"reward": 1.0, "completion_len": 3}] * size for size in (2, 3, 1)]
    found = custom_advantages(advantages_of, "the advantage", {}, groups)
    assert [each.tolist() for each in found] == [[0.0] * 2, [0.0] * 3, [0.0]]


@pytest.fixture(autouse=True)
def _examples_stay_unloaded() -> Any:
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "examples"]:
        del sys.modules[name]
