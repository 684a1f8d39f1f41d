"""The actors and the code that runs in their processes.

    trainer, generator, sdpo_teacher, environment,
    expert_server, reference, rollouts                    the kinds of actors, a file each
    panel_actors                                          teacher replay, hint writer, judge
    learning, teacher_outputs, checkpoints, models        training and SDPO teachers
    engines                                               sampling
    panel, provider, experts                              teachers and judges over HTTP, costs

An actor never holds another actor's handle. The allowed imports are listed in pyproject.toml.
"""
