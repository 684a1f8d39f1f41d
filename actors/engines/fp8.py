"""FP8 weights of the embedded engine: the linear layers of a model's decoder, for rollouts.

    weight [out, in] -> codes (float8 E4M3) and a float32 scale for each row
    input [tokens, in] -> the same, for each token, whenever a layer is called

A layer returns the product of what codes and scales stand for: torch multiplies the codes and
scales the result. Embeddings, head, norms and biases keep their type. New weights are quantized
again where they lie.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from composer_mesh.actors.engines.port import VersionedWeights
from composer_mesh.actors.models.expert_routing import expert_sizes
from composer_mesh.actors.models.sharding import decoder_layers
from composer_mesh.configs.worded import Worded
from composer_mesh.mesh.weights.manifest import WeightsMismatch

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
SMALLEST_SCALE = 1e-12
"""Scale of a row of zeros."""
MULTIPLE = 16
"""Both sides of a weight must be a multiple of it; other layers are not quantized."""
CAPABILITY = (8, 9)
"""The least CUDA compute capability that multiplies E4M3."""


class Fp8NotServed(Worded, ValueError):
    """A model or a device that cannot serve FP8 weights: the reason."""

    message = "generator.quantization is 'fp8', but {0}: set it to 'none'"


def quantize_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes of `[..., width]`, and a float32 scale of each row `[..., 1]`.

    The scale is the row's largest magnitude over 448, the largest of E4M3. A row that is not
    finite stays so.
    """
    exact = values.float()
    scale = (exact.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
    return (exact / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


class Fp8Linear(nn.Module):
    """A linear layer whose weight is codes and scales, and whose inputs are quantized too."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        codes, scale = quantize_rows(linear.weight.detach())
        self.register_buffer("weight", codes)
        self.register_buffer("scale", scale)

    @torch.no_grad()
    def requantize(self, weight: Tensor) -> None:
        """Replace the weight in place."""
        codes, scale = quantize_rows(weight.to(self.weight.device))
        self.weight.copy_(codes)
        self.scale.copy_(scale)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return `[..., out]` of inputs `[..., in]`, in their type."""
        codes, scale = quantize_rows(inputs.reshape(-1, inputs.shape[-1]))
        outputs = torch._scaled_mm(
            codes,
            self.weight.t(),
            scale_a=scale,
            scale_b=self.scale.t(),
            out_dtype=inputs.dtype,
        )
        if self.bias is not None:
            outputs = outputs + self.bias
        return outputs.view(*inputs.shape[:-1], -1)


def quantize_model(model: Any) -> Any:
    """Replace the linear layers of a model's decoder, in place; return it.

    Raises `Fp8NotServed` for mixtures, whose experts are no linear layers, for models without a
    layer of fitting size, and for devices that cannot multiply E4M3.
    """
    name, device = type(model).__name__, model.device
    if device.type == "cuda":
        refuse_old_gpu(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    if expert_sizes(model.config) is not None:
        raise Fp8NotServed(f"{name} is a mixture, whose experts would keep their type")
    replaced = 0
    for layer in decoder_layers(model):
        for path, linear in [*layer.named_modules()]:
            if isinstance(linear, nn.Linear) and not any(n % MULTIPLE for n in linear.weight.shape):
                layer.set_submodule(path, Fp8Linear(linear))
                replaced += 1
    if not replaced:
        raise Fp8NotServed(f"{name} has no linear layer whose sides are multiples of {MULTIPLE}")
    return model


def refuse_old_gpu(name: str, capability: tuple[int, int]) -> None:
    """Raise `Fp8NotServed` for a GPU that does not multiply E4M3."""
    if capability < CAPABILITY:
        have, need = (".".join(map(str, one)) for one in (capability, CAPABILITY))
        raise Fp8NotServed(f"{name} has compute capability {have}, and FP8 needs {need}")


@torch.no_grad()
def load_weights(model: Any, weights: VersionedWeights) -> None:
    """Copy a version of the weights to a model, in place; quantize what the model has as codes.

    Raises `WeightsMismatch` for weights that are not those of the model.
    """
    quantized = {
        f"{path}.weight": one for path, one in model.named_modules() if isinstance(one, Fp8Linear)
    }
    if not quantized:
        weights.apply(model)
        return
    scales = {f"{path.removesuffix('.weight')}.scale" for path in quantized}
    own = {name: one for name, one in model.state_dict().items() if name not in scales}
    seen = set[str]()
    for names, tensor in weights.tensors():
        for name in names:
            target = own.get(name)
            if target is None or target.shape != tensor.shape:
                have = "no such tensor" if target is None else f"shape {[*target.shape]}"
                raise WeightsMismatch(
                    f"{name} of shape {[*tensor.shape]} was published, but the served model has "
                    f"{have}: build both from one config"
                )
            if name in quantized:
                quantized[name].requantize(tensor)
            else:
                target.copy_(tensor)
            seen.add(name)
    if missing := sorted(own.keys() - seen):
        raise WeightsMismatch(
            f"{missing[0]} is missing in the published weights: build both from one config"
        )
