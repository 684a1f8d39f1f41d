"""CLI command `eval`: accepts what is evaluated, claims a directory, then starts.

Torch and Monarch are imported only where actors are started.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from composer_mesh.actors.provider.endpoint import TeacherEndpoint
from composer_mesh.mesh.task_resources import serving
from composer_mesh.rollouts.budget import Prices
from composer_mesh.services.checks.accepting import (
    UsageError,
    accept,
    listed,
    startable,
    use_umask,
)
from composer_mesh.services.checks.keys import check_judge_keys
from composer_mesh.services.checks.task import heldout_of
from composer_mesh.services.commands.parser import (
    add_set,
    argument,
    command,
    dollars,
    output,
    seconds,
)
from composer_mesh.services.commands.training import prepare, refuse_or_set_aside
from composer_mesh.services.directory.claim import RUNS, claimed, output_path
from composer_mesh.services.directory.resume import pinned, with_chat_date
from composer_mesh.services.evaluation.report import about, open_output
from composer_mesh.services.evaluation.target import EvalRefused, Target, target_of
from composer_mesh.services.schedule.stopping import CommandSignals
from composer_mesh.tasks.loading import make_task

PRICE = "dollars for a million {} tokens of a URL; required for --max-usd"
KEYS_OF_URLS = ("model", "api_key_env", "max_usd", "prompt_usd", "completion_usd")


@command(
    "evaluate a config, a run, a checkpoint or an endpoint on a task",
    argument(
        "target",
        metavar="CONFIG|RUN|CHECKPOINT|URL",
        help="TOML file, preset, run directory, model folder, or OpenAI-compatible URL",
    ),
    argument(
        "--task",
        metavar="TASK|CONFIG",
        help=(
            "task as in data.task, a TOML file or a preset; for URLs and for model folders "
            "outside of runs"
        ),
    ),
    argument(
        "--samples", type=int, default=1, metavar="K", help="samples of each episode (default: 1)"
    ),
    argument(
        "--report", type=output_path, metavar="FILE", help="write the figures to this file as JSON"
    ),
    output("where traces are stored (default: runs/NAME-eval; an earlier one moves aside)"),
    argument(
        "--resume",
        action="store_true",
        help="play only the episodes that are not stored in that directory",
    ),
    argument(
        "--policy",
        choices=("gold", "empty"),
        help="play the task's own gold actions, or empty answers, in place of a config's model",
    ),
    argument("--model", metavar="NAME", help="model name in requests to a URL"),
    argument(
        "--api-key-env", metavar="NAME", help="environment variable with the API key for a URL"
    ),
    argument(
        "--max-tokens",
        type=int,
        default=1024,
        metavar="N",
        help="maximum tokens of a URL's answer (default: 1024)",
    ),
    argument(
        "--max-usd", type=dollars, metavar="USD", help="maximum total cost of a URL, in dollars"
    ),
    argument("--prompt-usd", type=dollars, metavar="USD", help=PRICE.format("prompt")),
    argument("--completion-usd", type=dollars, metavar="USD", help=PRICE.format("answer")),
    argument(
        "--concurrency",
        type=int,
        default=16,
        metavar="N",
        help="concurrent requests to a URL (default: 16)",
    ),
    argument(
        "--timeout",
        type=seconds,
        default=120.0,
        metavar="S",
        help="seconds to wait for a URL's answer (default: 120)",
    ),
    add_set,
    signals=True,
    group="train",
    example="eval runs/quickstart --samples 4 --set eval.temperature=1.0",
)
def evaluate(arguments: argparse.Namespace, signals: CommandSignals) -> int:
    """Evaluate a config, a run, a checkpoint or an endpoint on held-out episodes."""
    try:
        return _evaluate(arguments, signals)
    except EvalRefused as refused:
        raise UsageError(str(refused)) from refused


def _evaluate(arguments: argparse.Namespace, signals: CommandSignals) -> int:
    target = target_of(arguments.target, arguments.task, arguments.set)
    _refuse_unfit(arguments, target)
    config = target.config
    output: Path = arguments.output or RUNS / f"{config.run.name}-eval"
    config = listed(pinned(config, output) if arguments.resume else config)
    target = replace(target, config=config)
    if target.url is None and arguments.policy is None:
        accept(config)
        startable(config)
    use_umask(config)
    task = make_task(config)
    indices = heldout_of(task, config.eval.episodes)
    if arguments.policy == "gold":
        for part in task.parts:  # one that states none says so before anything is stored
            part.gold(part.episode("heldout", 0).payload)
    if not arguments.resume:
        refuse_or_set_aside(output, named=arguments.output is not None)
    with claimed(output):
        who = arguments.model or arguments.policy or ""
        description = about(target, who, arguments.samples, arguments.max_tokens)
        config = with_chat_date(config, open_output(output, description, arguments.resume))
        prepare(output, signals)
        from composer_mesh.services.evaluation import command

        left = command.left_of(output, indices)
        command.tell_of_groups(task, arguments.samples)
        code = 0
        actor = arguments.policy if target.url is None else _endpoint(arguments, target)
        if left and actor is None:
            code = command.evaluate_by_mesh(config, output, left, arguments.samples, signals)
        elif left:
            with serving(config, task):
                code = command.evaluate_in_process(
                    config,
                    task,
                    output,
                    left,
                    arguments.samples,
                    actor,
                    signals,
                    timeout_s=arguments.timeout,
                    max_usd=arguments.max_usd,
                )
        command.report(output, description, indices, arguments.samples, arguments.report)
        return code


def _endpoint(arguments: argparse.Namespace, target: Target) -> TeacherEndpoint:
    assert target.url is not None
    return TeacherEndpoint(
        arguments.model,
        target.url,
        arguments.model,
        arguments.api_key_env,
        max_tokens=arguments.max_tokens,
        temperature=target.config.eval.temperature,
        prices=_prices(arguments),
        concurrency=arguments.concurrency,
    )


def _prices(arguments: argparse.Namespace) -> Prices | None:
    prompt, completion = arguments.prompt_usd, arguments.completion_usd
    if (prompt is None) != (completion is None):
        raise EvalRefused("--prompt-usd and --completion-usd belong together: add the other one")
    if arguments.max_usd is not None and prompt is None:
        raise EvalRefused(
            f"--max-usd is {arguments.max_usd:g} but no price is known, so no ceiling could hold: "
            "add --prompt-usd and --completion-usd, in dollars per million tokens"
        )
    return None if prompt is None else Prices.per_million(prompt, completion)


def _refuse_unfit(arguments: argparse.Namespace, target: Target) -> None:
    for name in ("samples", "max_tokens", "concurrency"):
        if (value := getattr(arguments, name)) < 1:
            option = name.replace("_", "-")
            raise EvalRefused(f"--{option} is {value} but must be at least 1: raise it")
    if arguments.policy is not None:
        _refuse_with_policy(arguments, target)
    if arguments.samples > 1 and not target.config.eval.temperature:
        raise EvalRefused(
            f"--samples is {arguments.samples} but eval.temperature is 0, so all samples of an "
            "episode would be the same: add --set eval.temperature=1.0"
        )
    if target.url is None:
        for name in KEYS_OF_URLS:
            if getattr(arguments, name) is not None:
                option = name.replace("_", "-")
                raise EvalRefused(f"--{option} is for URLs, which {target.name} is not: remove it")
    elif arguments.model is None:
        raise EvalRefused(f"{target.url} serves models by name: add --model NAME")
    else:
        _prices(arguments)
        check_judge_keys(target.config)


def _refuse_with_policy(arguments: argparse.Namespace, target: Target) -> None:
    if target.url is not None:
        raise EvalRefused(
            f"--policy is {arguments.policy} but actions are requested from {target.url}: "
            "name a config"
        )
    if arguments.samples > 1:
        raise EvalRefused(
            f"--samples is {arguments.samples} but the policy {arguments.policy} always acts the "
            "same: remove one of both"
        )
    check_judge_keys(target.config)
