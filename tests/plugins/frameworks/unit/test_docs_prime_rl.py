"""docs/prime-rl.md: its code runs, and its table has every loss."""

from typing import Any

from guides import Guide

from composer_mesh.plugins.frameworks import prime_rl

PAGE = Guide.read("prime-rl.md")


def test_the_python_of_the_page_runs_and_every_type_is_named() -> None:
    found: dict[str, Any] = {}
    for block in PAGE.blocks("python"):
        exec(block, found)
    assert found["sequence"].trainer_logprobs.grad.any()
    for name in (*prime_rl.TYPES, "policy_loss", "sdpo_loss", "loss_fn"):
        assert f"`{name}`" in PAGE.text, name
