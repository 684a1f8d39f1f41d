"""Judges of a dry episode: each answers with an example of the wanted form, and none is asked."""

import json

from composer_mesh.services.checks.example_arguments import example_of
from composer_mesh.tasks.judges import JudgeQuestion, JudgeReply


class ExampleJudges:
    """The port `Judges` without a model; `asked` are the names of the judges."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    async def ask(self, question: JudgeQuestion) -> JudgeReply:
        """Return an example of the wanted answer."""
        self.asked.add(question.judge)
        return JudgeReply(json.dumps(example_of(question.schema)))
