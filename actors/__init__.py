"""The actors and the code that runs in their processes.

    trainer, generator, sdpo_teacher, teacher_replay,
    environment, expert_server, hint_writer, judge,
    reference                                             the kinds of actors, a file each
    learning, teacher_outputs, checkpoints, models        training and SDPO teachers
    engines                                               sampling
    panel, provider, hints, experts                       teachers and judges over HTTP, costs

An actor never holds another actor's handle. The allowed imports are listed in pyproject.toml.
"""
