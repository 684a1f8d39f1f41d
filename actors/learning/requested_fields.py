"""What a custom loss may read of the policy beyond log-probs, computed only on request.

Entropies come from the fused head; only logits are made for all sampled tokens at once.

Axes: B sequences of a microbatch, T their padded length, H hidden size.
"""

from torch import Tensor

from composer_mesh.actors.models.hidden_states import HiddenStates
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.configs.losses import CustomLoss
from composer_mesh.losses.fused_entropies import linear_entropies
from composer_mesh.losses.logprobs import linear_logits


def requested_fields(
    loss: CustomLoss,
    model: LanguageModel,
    hidden: HiddenStates,
    mask: Tensor,
    temperature: float,
) -> list[dict[str, Tensor]]:
    """Return the fields that a custom loss needs beyond log-probs, of each sequence.

    `mask` is [B, T - 1]; only "logits" makes scores of all sampled tokens.
    """
    rows, counts = hidden.predicting(mask), mask.sum(-1).tolist()
    found: dict[str, Tensor] = {}
    if "hidden_states" in loss.needs:
        found["hidden_states"] = rows.states
    if "entropies" in loss.needs:
        found["entropies"] = linear_entropies(
            rows.states,
            model.weight,
            bias=model.bias,
            softcap=model.softcap,
            temperature=temperature,
        )
    if "logits" in loss.needs:
        found["logits"] = linear_logits(
            rows.states, model.weight, model.bias, temperature, softcap=model.softcap
        )
    parts = {name: rows.whole(tensor).split(counts) for name, tensor in found.items()}
    return [{name: split[row] for name, split in parts.items()} for row in range(len(mask))]
