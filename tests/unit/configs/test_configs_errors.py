"""A run that cannot be is refused: status 2, one message with value, bound and repair."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from repository import ROOT

from composer_mesh.configs.policy import PolicyConfig
from composer_mesh.services.cli import main

QUICKSTART = ROOT / "configs" / "quickstart.toml"
GSM8K = ROOT / "configs" / "gsm8k.toml"

# override(s), then what the message must say: the value, the bound, the repair
BROKEN = {
    "unknown key": (
        ["generator.replica=2"],
        ["generator.replica = 2", "unknown key", "did you mean generator.replicas?"],
    ),
    "smoothing of nothing": (
        ["replay.loss=apo_zero", "replay.label_smoothing=0.1"],
        ["label_smoothing is 0.1", "loss is 'apo_zero', which has none", "remove it"],
    ),
    "exo without smoothing": (
        ["replay.loss=exo_pair"],
        ["label_smoothing is 0", "exo_pair takes its logarithm", "set label_smoothing to 1e-3"],
    ),
    "divergence of another loss": (
        ["replay.loss=ipo", "replay.f_divergence_type=forward_kl"],
        ["f_divergence_type is 'forward_kl'", "ipo knows no other", "set loss to 'dpo'"],
    ),
    "length weight without sums": (
        ["replay.loss=simpo", "replay.ld_alpha=0.5"],
        ["ld_alpha is 0.5", "averages over all tokens", "set loss to 'dpo'"],
    ),
    "more updates than groups": (
        ["trainer.updates_per_batch=300"],
        ["trainer.updates_per_batch is 300", "prompts_per_step is ", "lower it to "],
    ),
    "mix of nothing": (
        ["replay.mpo_types={}"],
        ["mpo_types is empty", "as dpo = 1.0"],
    ),
    "unknown section": (
        ["generatr.replicas=2"],
        ["generatr.replicas = 2", "unknown key", "did you mean generator.replicas?"],
    ),
    "key of another section": (
        ["trainer.clip_low=0.1"],
        ["trainer.clip_low = 0.1", "unknown key", "did you mean loss.clip_low?"],
    ),
    "key of another loss": (
        ["loss.tau_positive=0.2"],
        ["loss.tau_positive = 0.2", "loss.type 'grpo' has no such key", "only 'sapo' has"],
    ),
    "unknown loss": (
        ["loss.type=ppo"],
        ["type must be one of 'grpo', 'cispo'", "write one of these"],
    ),
    "bound of a chosen loss": (
        ["loss.type=cispo", "loss.clip_low=1.5"],
        ["loss.clip_low = 1.5", "at most 1", "lower it to 1"],
    ),
    "custom loss without a path": (
        ["loss.type=custom"],
        ["loss.import_path is not set", "type 'custom' needs it", "under [loss]"],
    ),
    "rejection that leaves nothing": (
        ["loss.type=decoupled_ppo", "loss.rejection.lower=9.0"],
        ["lower is 9.0", "upper is 5.0", "lower it below upper"],
    ),
    "clamp of a KL": (
        ["loss.type=decoupled_ppo", "loss.rejection={action='clamp', metric='kl_k2'}"],
        ["action is 'clamp'", "'kl_k2'", "set metric to 'ratio'"],
    ),
    "correction without room": (
        ["loss.correction=token_mask", "loss.correction_minimum=4.0"],
        ["correction_minimum is 4.0", "correction_maximum is 3.0", "lower correction_minimum"],
    ),
    "correction of whole rollouts by tokens": (
        ["loss.type=vespo", "loss.correction=sequence_mask"],
        ["correction is 'sequence_mask'", "vespo multiplies", "use 'token_truncate'"],
    ),
    "cap below the clip": (
        ["loss.ratio_cap=1.1"],
        ["ratio_cap is 1.1", "grow to 1.28", "raise ratio_cap"],
    ),
    "KL weight of nothing": (
        ["loss.kl_importance=true"],
        ["kl_importance is true", "kl_beta is 0", "set kl_beta"],
    ),
    "estimator of no KL": (
        ["loss.type=sapo", "loss.kl_estimator=k2"],
        ["kl_estimator is k2", "kl_beta is 0", "remove kl_estimator"],
    ),
    "buffer beyond the limit": (
        ["advantage.length_penalty={type='overlong', max_length=10, buffer=20}"],
        ["buffer is 20", "max_length is 10", "lower buffer"],
    ),
    "smoothed IPO": (
        ["replay.loss=ipo", "replay.label_smoothing=0.1"],
        ["label_smoothing is 0.1", "'ipo'", "set loss to 'dpo'"],
    ),
    "gate without its objective": (
        ["sdpo.entropy_opd_h_max=2.0"],
        ["entropy_opd_h_max is 2.0", "objective is 'none'", "remove it"],
    ),
    "objective without distributions": (
        ["sdpo.objective=taid", "sdpo.teacher_output=topk"],
        ["objective is 'taid'", "teacher_output is 'topk'", "'hidden' or 'full'"],
    ),
    "teacher without its model": (
        ["sdpo.teacher=model"],
        ["teacher is 'model'", "teacher_model is not set", "set teacher_model.path"],
    ),
    "model without its teacher": (
        ["sdpo.teacher_model.path=nowhere"],
        ["teacher_model.path is 'nowhere'", "teacher is 'live'", "set teacher to 'model'"],
    ),
    "teacher's folder without a model": (
        ["sdpo.teacher=model", "sdpo.teacher_model.path=nowhere"],
        ['sdpo.teacher_model.path = "nowhere"', "holds config.json", "correct the path"],
    ),
    "many inline teachers": (
        ["sdpo.placement=inline", "sdpo.replicas=2"],
        ["replicas is 2", "placement is 'inline'", "replicas to 1"],
    ),
    "number for a loss": (["loss=3"], ["loss = 3", "must be a table with a type", "[loss]"]),
    "path through a number": (
        ["run.steps.first=2"],
        ["run.steps.first = 2", "unknown key", "run.steps is not a table"],
    ),
    "wrong type": (["run.steps=many"], ['run.steps = "many"', "whole number", "without quotes"]),
    "boolean for a count": (["run.seed=true"], ["run.seed = true", "whole number", "write it"]),
    "half a step": (["run.steps=1.5"], ["run.steps = 1.5", "whole number", "decimal point"]),
    "number for a table": (["generator=3"], ["generator = 3", "a table", "[generator]"]),
    "negative alpha": (["sdpo.alpha=-0.5"], ["sdpo.alpha = -0.5", "at least 0", "raise it to 0"]),
    "negative beta": (["replay.beta=-1"], ["replay.beta = -1", "at least 0", "raise it to 0"]),
    "rate above one": (
        ["replay.teachers.0.error_rate=1.5"],
        ["replay.teachers[0].error_rate = 1.5", "at most 1", "lower it to 1"],
    ),
    "zero temperature": (
        ["generator.temperature=0"],
        ["temperature = 0", "at least 0.0001", "raise it"],
    ),
    "a temperature that float32 cannot divide by": (
        ["eval.temperature=1e-40"],
        ["temperature: 1e-40 is above 0 and below 0.0001", "use 0, which is greedy, or raise it"],
    ),
    "not a number": (["trainer.lr=nan"], ["trainer.lr = NaN", "finite", "ordinary number"]),
    "group of one": (["schedule.group_size=1"], ["group_size = 1", "at least 2", "raise it to 2"]),
    "oversampling of nothing": (
        ["schedule.oversampling=2"],
        ["oversampling is 2", "dynamic_sampling is false", "set dynamic_sampling to true"],
    ),
    "less than no oversampling": (
        ["schedule.dynamic_sampling=true", "schedule.oversampling=0.5"],
        ["oversampling = 0.5", "at least 1", "raise it to 1"],
    ),
    "overprovision in lockstep": (
        ["schedule.overprovision=2", "schedule.max_lag=0"],
        ["overprovision is 2", "max_lag is 0", "repeats bit for bit", "set max_lag to 1"],
    ),
    "carried in lockstep": (
        ["schedule.carried_groups=2", "schedule.max_lag=0"],
        ["carried_groups is 2", "max_lag is 0", "waits for all", "set max_lag to 1"],
    ),
    "age of nothing": (
        ["schedule.max_token_age=4"],
        ["max_token_age is 4", "carried_groups is 0", "remove max_token_age"],
    ),
    "tokens younger than the lag": (
        ["schedule.carried_groups=2", "schedule.max_lag=4", "schedule.max_token_age=3"],
        ["max_token_age is 3", "max_lag is 4", "raise max_token_age to max_lag"],
    ),
    "dropped before its rewards": (
        ["schedule.dynamic_sampling=true", "late_rewards.max_age=2"],
        ["schedule.dynamic_sampling is true", "late_rewards.max_age is 2", "max_age to 0"],
    ),
    "unknown choice": (
        ["trainer.lr_schedule=cosin"],
        ['lr_schedule = "cosin"', "'constant', 'linear' or 'cosine'", "write one of these"],
    ),
    "name that leaves runs/": (["run.name=../x"], ['"../x"', "must match", "use letters"]),
    "consensus above the asked": (
        ["replay.agreement_threshold=4"],
        ["agreement_threshold is 4", "ask is 3", "raise ask or lower agreement_threshold"],
    ),
    "more asked than there are": (
        ["replay.ask=5"],
        ["ask is 5", "3 teachers", "add [[replay.teachers]] or lower ask"],
    ),
    "two teachers of one name": (
        ["replay.teachers.1.name=careful"],
        ["2 entries named 'careful'", "unique", "rename"],
    ),
    "teacher without an address": (
        ['replay.teachers=[{name="a", kind="openai", model="m"}]', "replay.beta=0"],
        ["replay.teachers[0]", "base_url is not set", "set base_url"],
    ),
    "address of a builtin teacher": (
        ["replay.teachers.0.base_url=http://localhost"],
        ["base_url is 'http://localhost'", "kind is 'builtin'", "remove base_url"],
    ),
    "heads that share unevenly": (
        ["policy.heads=3"],
        ["heads is 3", "kv_heads is 2", "divisor of 3"],
    ),
    "odd head": (["policy.head_dim=33"], ["head_dim is 33", "even", "set it to 34"]),
    "tiny vocabulary": (["policy.vocab_size=100"], ["is 100", "at least 300", "raise it to 300"]),
    "an answer as long as the context": (
        ["generator.max_new_tokens=384"],
        ["max_new_tokens is 384", "policy.max_context is 384", "raise policy.max_context"],
    ),
    "a tree for kernels without masks": (
        [
            "trainer.prefix_sharing=true",
            "trainer.attention=flash",
            "trainer.compute_dtype=bfloat16",
        ],
        ["attention is 'flash', which takes no mask of a tree", "to 'sdpa', on a GPU to 'flex'"],
    ),
    "levels of a tree, compiled": (
        ["trainer.prefix_sharing=true", "trainer.compile=true"],
        ["every layer would be compiled several times", "set compile or prefix_sharing to false"],
    ),
    "contexts that do not divide the ranks": (
        ["trainer.ranks=3", "trainer.context_parallel=2", "trainer.packing=true"],
        ["context_parallel is 2 but ranks is 3", "set ranks to a multiple of 2"],
    ),
    "a context of rows apart": (
        ["trainer.ranks=2", "trainer.context_parallel=2"],
        ["context_parallel is 2 but packing is False", "set packing to True"],
    ),
    "a context of shared prefixes": (
        [
            *("trainer.ranks=2", "trainer.context_parallel=2", "trainer.packing=true"),
            "trainer.prefix_sharing=true",
        ],
        ["context_parallel is 2 but prefix_sharing is True", "set prefix_sharing to False"],
    ),
    "a context with another attention": (
        [
            *("trainer.ranks=2", "trainer.context_parallel=2", "trainer.packing=true"),
            "trainer.attention=eager",
        ],
        ["context_parallel is 2 but attention is 'eager'", "set attention to 'sdpa'"],
    ),
    "a context of compiled layers": (
        [
            *("trainer.ranks=2", "trainer.context_parallel=2", "trainer.packing=true"),
            "trainer.compile=true",
        ],
        ["context_parallel is 2 but compile is True", "set compile to False"],
    ),
    "compared actions of divided positions": (
        [
            *("trainer.ranks=2", "trainer.context_parallel=2", "trainer.packing=true"),
            *("sdpo.alpha=0.5", "sdpo.advantage_sites=4"),
        ],
        ["sdpo.advantage_sites is set but trainer.context_parallel is 2", "remove it"],
    ),
    "shares of an update of divided experts": (
        [
            *("trainer.ranks=2", "trainer.expert_parallel=2", "trainer.sharding=fsdp2"),
            "trainer.update_share_every=5",
        ],
        ["trainer.update_share_every is set but trainer.expert_parallel is 2", "remove it"],
    ),
    "a bounded share of divided positions": (
        [
            *("trainer.ranks=2", "trainer.context_parallel=2", "trainer.packing=true"),
            "replay.max_update_share=0.5",
        ],
        [
            "replay.min_update_share or max_update_share is set but trainer.context_parallel is 2",
            "remove it",
        ],
    ),
    "heads that no context divides": (
        ["trainer.ranks=3", "trainer.context_parallel=3", "trainer.packing=true"],
        ["context_parallel is 3 but policy.heads is 4", "set policy.heads to a multiple of 3"],
    ),
    "experts that do not divide the ranks": (
        ["trainer.ranks=3", "trainer.expert_parallel=2"],
        ["expert_parallel is 2 but ranks is 3", "set ranks to a multiple of 2"],
    ),
    "experts of complete copies": (
        ["trainer.ranks=2", "trainer.expert_parallel=2", "trainer.sharding=none"],
        ["expert_parallel is 2 but sharding is 'none'", "set sharding to 'fsdp2'"],
    ),
    "experts of compiled layers": (
        ["trainer.ranks=2", "trainer.expert_parallel=2", "trainer.compile=true"],
        ["expert_parallel is 2 but compile is True", "set compile to False"],
    ),
    "context beyond a microbatch": (
        ["trainer.microbatch_tokens=100"],
        ["microbatch_tokens is 100", "max_context is 384", "to 384 or more"],
    ),
    "missing data file": (
        ["data.task=gsm8k", "data.path=nowhere.jsonl"],
        ['data.path = "nowhere.jsonl"', "no such file", "relative to the working directory"],
    ),
    "data without a reader": (
        ["data.path=nowhere.jsonl"],
        ["path is 'nowhere.jsonl'", "task is 'toolbox'", "remove path"],
    ),
    "folder without a model": (
        ["policy.path=nowhere"],
        ['policy.path = "nowhere"', "holds config.json", "correct the path"],
    ),
    "FP8 products in float32": (
        ["generator.quantization=fp8"],
        ["generator.dtype is 'float32'", "set generator.dtype to 'bfloat16'"],
    ),
    "FP8 weights below adapters": (
        [
            "generator.quantization=fp8",
            "generator.dtype=bfloat16",
            "trainer.lora.rank=8",
            "trainer.lora.sync=adapters",
        ],
        ["generators get adapters alone", "set trainer.lora.sync to 'merged'"],
    ),
    "override without a value": (["run.steps"], ["'run.steps'", "KEY.PATH=VALUE", "--set run."]),
    "override of a missing entry": (
        ["replay.teachers.9.name=x"],
        ["replay.teachers[9]", "no table", "add it"],
    ),
}


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one message of a refused command."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("composer-mesh: ")
    return err


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize(("overrides", "said"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_run_is_refused_with_value_bound_and_repair(
    command: str,
    overrides: list[str],
    said: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    sets = [word for override in overrides for word in ("--set", override)]
    message = refusal([command, str(QUICKSTART), *sets], capsys)
    assert message.count("\n") == 1
    for part in said:
        assert part in message


def test_several_problems_are_one_message_with_a_line_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = ["--set", "sdpo.alpha=-1", "--set", "run.steps=0"]
    lines = refusal(["check", str(QUICKSTART), *broken], capsys).splitlines()
    assert lines[0].endswith("2 problems")
    assert [line.split(" = ")[0].strip() for line in lines[1:]] == ["run.steps", "sdpo.alpha"]


def test_a_missing_config_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(["check", "nowhere.toml"], capsys)
    assert "nowhere.toml does not exist: correct the path, or name a preset" in message
    assert "`composer-mesh presets` lists all" in message


def test_a_syntax_error_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.toml"
    path.write_text('[run]\nname = "x"\nsteps = = 3\n')
    assert "line 3" in refusal(["check", str(path)], capsys)


def test_an_empty_file_says_what_every_run_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "empty.toml"
    path.touch()
    message = refusal(["check", str(path)], capsys)
    assert "run is not set but every run needs it: add a table [run]" in message
    assert "data is not set but every run needs it: add a table [data]" in message


def test_gsm8k_without_a_file_says_how_to_give_one(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(["check", str(GSM8K)], capsys)
    assert "path is not set but task is 'gsm8k'" in message
    assert "--set data.path=FILE.jsonl" in message


@pytest.mark.parametrize("given", ["today", "2026-13-01", "20260131"])
def test_a_chat_date_that_is_no_date_is_refused_with_an_example(given: str) -> None:
    with pytest.raises(ValidationError, match=r"must be a date: write it as 2026-01-31"):
        PolicyConfig(path=Path("model"), chat_date=given)
