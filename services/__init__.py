"""Services: the controller, the run store and the command line, on top of the actors.

    cli, commands          the command line
    partial_runs, run      a complete or partial run, from its config to its end
    controller             schedules a run
    launch                 launches a run on its hosts
    schedule, episodes     rollout groups in flight; running one episode
    training, replay       optimizer steps; teacher pairs
    steps                  the inputs of a step, and the controller's ports
    store, directory       a run's stored state and its directory
    service, pool          replicas of one actor behind one name
    inspection, traces     views of a run, and of its rollouts
    offline, ablation      teacher queries without a mesh; comparison of runs

pyproject.toml defines which package may import which.
"""
