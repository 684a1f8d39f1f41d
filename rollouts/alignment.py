"""Which row of the student's forward belongs to which row of the teacher's.

The teacher reads the student's context with a hint put in just before the generation prompt of
the error's turn, then the same action ids. Everything is built from ids; no text is tokenized.
A row is the position whose logits predict the next id.
"""

from dataclasses import dataclass

from composer_mesh.rollouts.traces import Trace


class MisalignedError(ValueError):
    """A turn that is not there, or a context that does not end with the generation prompt."""


@dataclass(frozen=True, slots=True)
class HintedView:
    """One error site as both models see it.

    `teacher_ids` ends with the action. `student_rows[i]` and `teacher_rows[i]` predict the same
    id `targets[i]`; student rows count from the start of the trace's `token_ids()`.
    """

    trace_id: str
    turn: int
    teacher_ids: list[int]
    student_rows: list[int]
    teacher_rows: list[int]
    targets: list[int]

    @property
    def offset(self) -> int:
        """How far the hint moved the action: teacher row minus student row."""
        return self.teacher_rows[0] - self.student_rows[0]


def hinted_view(
    trace: Trace, turn: int, hint_ids: list[int], generation_prompt: list[int]
) -> HintedView:
    """The view of one error site; other sites of the trace do not change it.

    Nothing is decoded or tokenized: the hint's ids are put in, and every id of the response stays.
    """
    if not 0 <= turn < len(trace.turns):
        raise MisalignedError(
            f"turn {turn} of {trace.trace_id}, which has {len(trace.turns)} turns: let the "
            "environment name error sites by the turn whose action failed, from 0"
        )
    context, action = trace.prompt_ids(turn), trace.turns[turn].action_ids
    cut = len(context) - len(generation_prompt)
    if cut < 0 or context[cut:] != generation_prompt:
        raise MisalignedError(
            f"turn {turn} of {trace.trace_id} ends with {context[-len(generation_prompt) :]}, not "
            f"the generation prompt {generation_prompt}: use one chat template for the whole run"
        )
    teacher_ids = context[:cut] + hint_ids + generation_prompt + action
    first = len(context) - 1
    student_rows = list(range(first, first + len(action)))
    return HintedView(
        trace_id=trace.trace_id,
        turn=turn,
        teacher_ids=teacher_ids,
        student_rows=student_rows,
        teacher_rows=[row + len(hint_ids) for row in student_rows],
        targets=list(action),
    )
