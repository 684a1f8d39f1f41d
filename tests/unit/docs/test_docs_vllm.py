"""The page about vLLM names what exists, and its settings and its list of head widths are real."""

from __future__ import annotations

from guides import Guide, as_a_run

from composer_mesh.actors.engines.vllm_settings import CPU_HEAD_DIMS, check_vllm_fits

PAGE = Guide.read("vllm.md")


def test_the_settings_on_the_page_are_a_run_that_vllm_can_serve() -> None:
    (toml,) = PAGE.blocks("toml")
    run = as_a_run(toml)
    assert run.generator.engine == "vllm"
    check_vllm_fits(run)


def test_the_head_widths_on_the_page_are_those_that_are_checked() -> None:
    *most, last = map(str, CPU_HEAD_DIMS)
    assert f"{', '.join(most)} and {last};" in PAGE.text.replace("\n", " ")
