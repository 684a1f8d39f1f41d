"""Token alignment between the student's forward and the teacher's forward with a hint.

The teacher reads the student's context with a hint inserted just before the generation prompt of
the turn that failed, followed by the same action ids. All sequences are built from ids; no text is
tokenized. A row is the position whose logits predict the next id.
"""

from dataclasses import dataclass, replace

from composer_mesh.rollouts.traces import Trace


class MisalignedError(ValueError):
    """The turn does not exist or has no action, or its context does not end with the generation
    prompt."""


@dataclass(frozen=True, slots=True)
class HintedView:
    """One error site as token sequences of the student and of the teacher.

    A `compared` view trains nothing: its action is a right one, at which the hinted teacher and the
    student are compared.
    """

    trace_id: str
    turn: int
    teacher_ids: list[int]
    student_rows: list[int]
    teacher_rows: list[int]
    targets: list[int]
    compared: bool = False

    @property
    def offset(self) -> int:
        """Return the shift of the action by the hint: teacher row minus student row."""
        return self.teacher_rows[0] - self.student_rows[0]


def hinted_view(
    trace: Trace, turn: int, hint_ids: list[int], generation_prompt: list[int]
) -> HintedView:
    """Build the view of one error site; other sites of the trace do not affect it.

    Hint ids are inserted and all response ids stay unmodified; nothing is decoded or tokenized.
    """
    if not 0 <= turn < len(trace.turns):
        raise MisalignedError(
            f"turn {turn} of {trace.trace_id}, which has {len(trace.turns)} turns: let the "
            "environment name error sites by the turn whose action failed, from 0"
        )
    context, action = trace.prompt_ids(turn), trace.turns[turn].action_ids
    return aligned_view(trace.trace_id, turn, context, action, hint_ids, generation_prompt)


def aligned_view(
    trace_id: str,
    turn: int,
    context: list[int],
    action: list[int],
    hint_ids: list[int],
    generation_prompt: list[int],
) -> HintedView:
    """Build the view of a turn from its whole context and its action."""
    if not action:
        raise MisalignedError(
            f"turn {turn} of {trace_id} has no action token, so a hint has nothing to teach: leave "
            "the turn out"
        )
    cut = len(context) - len(generation_prompt)
    if cut < 0 or context[cut:] != generation_prompt:
        raise MisalignedError(
            f"turn {turn} of {trace_id} ends with {context[-len(generation_prompt) :]}, not "
            f"the generation prompt {generation_prompt}: use one chat template for the whole run"
        )
    first = len(context) - 1
    student_rows = list(range(first, first + len(action)))
    return HintedView(
        trace_id=trace_id,
        turn=turn,
        teacher_ids=context[:cut] + hint_ids + generation_prompt + action,
        student_rows=student_rows,
        teacher_rows=[row + len(hint_ids) for row in student_rows],
        targets=list(action),
    )


def compared_view(view: HintedView, trace_id: str, action: list[int]) -> HintedView:
    """Return the view of a right action in the contexts of a view, where another trace has it.

    The other trace has read the same ids up to the same turn, so the student's rows are its own.
    """
    first, hinted = view.student_rows[0], view.teacher_rows[0]
    return replace(
        view,
        trace_id=trace_id,
        teacher_ids=view.teacher_ids[: hinted + 1] + action,
        student_rows=list(range(first, first + len(action))),
        teacher_rows=list(range(hinted, hinted + len(action))),
        targets=list(action),
        compared=True,
    )
