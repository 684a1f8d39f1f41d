"""How the actors work together: the controller, the run store, the command line.

    cli, commands          what may be typed
    halves, run            a run, or half of one, from its config to its end
    controller             what happens in a run, and in which order
    launch                 bringing a run to its hosts
    schedule, episodes     groups of rollouts under way, and one of them played
    training, replay       optimizer steps; the teachers' pairs
    steps                  what a step is made of
    store, directory       what a run keeps, and where
    service, pool          replicas of one actor behind one name
    looking, traces        what people see of a run, and of its rollouts
    offline, ablation      without a mesh; run against run

Who may import whom stands in pyproject.toml.
"""
