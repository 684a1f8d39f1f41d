"""Trees in one row by FlexAttention's kernels on an accelerator: the dense states and gradients."""

from __future__ import annotations

import pytest
import torch
from prefix_trees import MODELS, built, random_tree, trained

from composer_mesh.actors.models.sharding import decoder_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # those of torch's compiler would end the compilation
]
WITHIN = 2e-3
"""Kernels may multiply in TF32."""


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_row_by_flex_attention_has_the_gradients_of_dense_rows(name: str, compiled: bool) -> None:
    model = built(MODELS[name]).cuda()
    cases = [random_tree(seed) for seed in range(3)]
    dense = [trained(model, one, "off") for one in cases]
    model.set_attn_implementation("flex_attention")
    if compiled:
        for layer in decoder_layers(model):
            layer.forward = torch.compile(layer.forward, dynamic=True)
    for sequences, (logprobs, expected) in zip(cases, dense, strict=True):
        found, gradients = trained(model, sequences, "row")
        torch.testing.assert_close(found, logprobs, rtol=WITHIN, atol=WITHIN)
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=WITHIN, atol=WITHIN)
