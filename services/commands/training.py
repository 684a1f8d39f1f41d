"""CLI commands that take a config: check, and train fully or partially.

Heavy modules are imported only when a command runs, after the config was accepted, so that `check`
loads neither torch nor Monarch.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from composer_mesh.configs.changes import Change
from composer_mesh.configs.load import changed_tables, dump_toml, load_config
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.environment import prepare_environment
from composer_mesh.mesh.monarch_log import LOGS, open_log
from composer_mesh.mesh.private_folder import own_private_folder
from composer_mesh.planning.mesh_layout import plan_mesh
from composer_mesh.services.checks.accepting import (
    UsageError,
    accept,
    accepted,
    chat_remarks,
    check_packages,
    listed,
    startable,
    use_umask,
)
from composer_mesh.services.checks.hub import hub_remarks
from composer_mesh.services.checks.rehearsal import refuse_unplayable, rehearse
from composer_mesh.services.checks.task import facts_of, heldout_of
from composer_mesh.services.commands.parser import (
    Add,
    add_config,
    argument,
    command,
    one_of,
    output,
)
from composer_mesh.services.directory.claim import (
    RUNS,
    claimed,
    refuse_a_used,
    set_aside,
)
from composer_mesh.services.directory.report import STORE_FILE
from composer_mesh.services.directory.resume import (
    RunFinished,
    may_be_resumed,
    pinned,
    recorded_date,
    refuse_unfit,
    with_chat_date,
)
from composer_mesh.services.directory.sft_start import SUFFIX, NoStart
from composer_mesh.services.inspection.events_command import clock
from composer_mesh.services.inspection.placement_table import (
    channels_line,
    print_placement,
    print_plan,
    print_tables,
)
from composer_mesh.services.schedule.stopping import CommandSignals
from composer_mesh.services.sft.config import sft_config
from composer_mesh.tasks.loading import fewer_episodes, make_task


@command(
    "check a config: what it changes, its mesh and memory, one dry episode; starts nothing",
    add_config,
    argument("--all", action="store_true", help="print every key of the resolved config"),
    argument(
        "--gold",
        action="append_const",
        dest="scripts",
        const="gold",
        help="play the gold actions of every episode; refuse the task unless all succeed",
    ),
    argument(
        "--empty",
        action="append_const",
        dest="scripts",
        const="empty",
        help="play an empty answer in every episode; refuse the task if one succeeds",
    ),
    group="configs",
    example="check quickstart --set trainer.lr=1e-4",
)
def check(arguments: argparse.Namespace) -> int:
    """Print the resolved run, its mesh and its placement; plays one dry episode.

    Starts nothing but the MCP servers of the config, which it ends again.
    """
    given = load_config(arguments.config, arguments.set, model_later=True)
    start = []
    try:
        config = listed(given)
    except NoStart as missing:
        policy = given.policy.model_copy(update={"start": "base"})
        config, start = listed(given.model_copy(update={"policy": policy})), [str(missing)]
    placements = accept(config)
    if not config.placement.hosts:  # described hosts need not include this one
        check_packages(config)
    task, episodes = make_task(config), config.eval.episodes
    lines = [
        *start,
        *hub_remarks(config),
        *chat_remarks(config, task.tools),
        *rehearse(config, scripts=arguments.scripts or ()),
    ]
    heldout = heldout_of(task, episodes)
    lines += facts_of(config, task, len(heldout))
    if fewer := fewer_episodes(heldout, episodes):
        lines.append(fewer)
    plan, console = plan_mesh(config), Console()
    if arguments.all:
        print(dump_toml(config))
        print_plan(plan, console)
    else:
        print(f"{arguments.config}: keys that differ from their defaults; --all prints all keys")
        print_tables(changed_tables(config), console)
        print(channels_line(plan))
    for line in lines:
        print(line)
    print_placement(placements, console)
    return 0


def _of_run(name: str, *alone: Add) -> tuple[Add, ...]:
    """Return the config of a run, and where it is written and resumed; `alone` exclude resuming."""
    return (
        add_config,
        output(f"where the run is written (default: {name}; an earlier run there moves aside)"),
        one_of(
            argument(
                "--resume",
                action="store_true",
                help="continue the run in that directory where it was stopped",
            ),
            argument(
                "--auto-resume",
                action="store_true",
                help="continue or begin the run in that directory; keep a finished one unchanged",
            ),
            *alone,
        ),
    )


@command(
    "train and evaluate a run",
    *_of_run(
        "runs/NAME",
        argument(
            "--from-traces",
            type=Path,
            metavar="RUN",
            help="train on the rollouts that a run has stored, without generators",
        ),
        argument(
            "--rollout-only",
            action="store_true",
            help="sample and store rollouts, without a trainer",
        ),
    ),
    signals=True,
    group="train",
    example="train quickstart --set run.steps=20 --output runs/short",
)
def train(arguments: argparse.Namespace, signals: CommandSignals) -> int:
    """Accept the config, claim the run directory, then start the run."""
    config = load_config(arguments.config, arguments.set)
    config = accepted(_as_before(arguments, config))
    use_umask(config)
    if not arguments.from_traces:
        refuse_unplayable(config)
    if arguments.rollout_only or arguments.from_traces:
        return _half(config, arguments.output, arguments.from_traces, signals)
    return _whole(config, arguments, signals)


@command(
    "fine-tune on conversations, before train",
    *_of_run(f"runs/NAME{SUFFIX}"),
    signals=True,
    group="train",
    example="sft gsm8k --set data.path=FILE.jsonl --set sft.path=CHATS.jsonl --set sft.steps=100",
)
def sft(arguments: argparse.Namespace, signals: CommandSignals) -> int:
    """Accept the config of a supervised run, claim its directory, then start it."""
    config = sft_config(load_config(arguments.config, arguments.set))
    config = listed(_as_before(arguments, config))
    refuse_an_island(config, "fine-tunes one model alone")
    accept(config)
    startable(config)
    use_umask(config)
    return _whole(config, arguments, signals, supervised=True)


def _whole(
    config: Config,
    arguments: argparse.Namespace,
    signals: CommandSignals,
    *,
    supervised: bool = False,
) -> int:
    """Start a run in its directory, or resume it there."""
    output, resumed = arguments.output or RUNS / config.run.name, None
    try:
        if arguments.resume or (arguments.auto_resume and may_be_resumed(output)):
            resumed = refuse_unfit(output, config)
        elif not arguments.auto_resume:
            refuse_or_set_aside(output, named=arguments.output is not None)
    except RunFinished as finished:
        if not arguments.auto_resume:
            raise
        print(f"nothing to do: {finished}")
        return 0
    with claimed(output):
        return start(config, output, signals, resumed, supervised=supervised)


def _as_before(arguments: argparse.Namespace, config: Config) -> Config:
    """Return the config with the commits of the run that is resumed, or whose traces are used."""
    if arguments.resume or arguments.auto_resume:
        return pinned(config, arguments.output or RUNS / config.run.name)
    source: Path | None = getattr(arguments, "from_traces", None)
    return config if source is None else pinned(config, source)


def _half(config: Config, output: Path | None, source: Path | None, signals: CommandSignals) -> int:
    """Train on the stored rollouts of a run, or only sample if no run is named."""
    refuse_an_island(config, "trains or samples apart")
    place = output or RUNS / f"{config.run.name}-{'replayed' if source else 'rollouts'}"
    if source is not None and not (source / STORE_FILE).is_file():
        raise UsageError(
            f"--from-traces {source} has no {STORE_FILE} but must be the directory of a run: "
            "correct it"
        )
    refuse_or_set_aside(place, named=output is not None)
    with claimed(place):
        config = with_chat_date(config, recorded_date(place if source is None else source))
        prepare(place, signals)
        from composer_mesh.services.partial_runs.command import partial_run_command

        signals.check()
        return partial_run_command(config, place, source, signals)


def refuse_an_island(config: Config, why: str) -> None:
    """Raise `UsageError` for a config of an island, which this command cannot use."""
    if config.islands.on:
        key = "store" if config.islands.lighthouse is None else "lighthouse"
        raise UsageError(
            f"islands.{key} is {config.islands.address!r}, but this command {why}: remove it"
        )


def refuse_or_set_aside(output: Path, named: bool) -> None:
    """Refuse a used directory that the user named; move an earlier run out of a default one."""
    if named:
        refuse_a_used(output)
    elif place := set_aside(output):
        print(f"composer-mesh: moved the earlier run to {place}", file=sys.stderr)


def prepare(output: Path, signals: CommandSignals) -> None:
    """Prepare this process for a run: temporary files and logs in private folders, then Monarch."""
    prepare_environment()  # Monarch reads it when it is imported
    own_private_folder()
    os.environ[LOGS] = str((output / "logs").absolute())
    signals.hold()
    print(f"{clock(time.time())} phase loading PyTorch and Monarch", flush=True)
    open_log("controller")


def start(
    config: Config,
    output: Path,
    signals: CommandSignals,
    resumed: Sequence[Change] | None = None,
    *,
    supervised: bool = False,
) -> int:
    """Start a run; imports torch and Monarch.

    `resumed` are the config changes of a resumed run; a `supervised` one trains conversations.
    From here on no signal raises, because an import may swallow a KeyboardInterrupt.
    """
    use_umask(config)
    config = with_chat_date(config, recorded_date(output))
    prepare(output, signals)
    from composer_mesh.services.run.assembly import train_command
    from composer_mesh.services.sft.run import SftRun

    signals.check()
    return int(train_command(config, output, signals, resumed, SftRun if supervised else None))
