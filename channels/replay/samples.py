"""The replay channel's samples: preference pairs as ids."""

from collections.abc import Sequence

from composer_mesh.configs.replay import PairWeight
from composer_mesh.rollouts.batches import PairSample
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.pairs import PreferencePair, teachers_margin


def pair_samples(
    pairs: Sequence[PreferencePair],
    chat: ChatFormat,
    max_context: int,
    weight: PairWeight = "none",
) -> list[PairSample]:
    """Convert pairs to ids, encoding the chosen text once; drop pairs longer than `max_context`.

    With the weight "margin" each pair weighs what the teachers' margin is.
    """
    samples = [
        PairSample(
            p.pair_id,
            p.context_ids,
            chat.action(p.chosen_text),
            p.rejected_ids,
            p.reference,
            teachers_margin(p) if weight == "margin" else 1.0,
        )
        for p in pairs
    ]
    return [
        sample
        for sample in samples
        if len(sample.context_ids) + max(len(sample.chosen_ids), len(sample.rejected_ids))
        <= max_context
    ]
