"""What lives in a process. An actor never holds another actor's handle.

    trainer, generator, sdpo_teacher, teacher_replay,
    environment, expert_server, hint_writer, reference    the kinds of actors, a file each
    learning, signals, checkpoints, models                what trainer and teachers work with
    engines                                               what samples
    panel, provider, hints, experts                       teachers behind HTTP, and their money

Who may import whom stands in pyproject.toml.
"""
