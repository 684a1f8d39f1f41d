"""What the answer of a panel is to the task that asked a judge."""

from composer_mesh.rollouts.pairs import FailureKind, TeacherFailure, TeacherReply
from composer_mesh.tasks.errors import JudgeFailed, JudgesSpent
from composer_mesh.tasks.judges import JudgeReply


def reply_of(judge: str, reply: TeacherReply) -> JudgeReply:
    """Return a judge's answer; raises JudgesSpent where it was not asked, else JudgeFailed."""
    if not isinstance(reply, TeacherFailure):
        return JudgeReply(reply.action_text, reply.usd, reply.cached)
    if reply.kind is FailureKind.BUDGET:
        raise JudgesSpent(judge, reply.text)
    raise JudgeFailed(judge, reply.text)
