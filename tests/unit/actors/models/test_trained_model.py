"""A model is built for training as the config says, and exported as it came."""

from __future__ import annotations

import pickle
import random
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_families import family_folder
from pydantic import ValidationError
from repetition import crossed
from safetensors.torch import load_file, save_file
from step_batches import batch_of, begun_with, largest_change, weights_of

from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.backend import optimizers_of
from composer_mesh.actors.models.lora import OtherAdapters, adapted_layers, export_state
from composer_mesh.actors.models.optimizer_state import StateOfOtherWeights
from composer_mesh.actors.models.policy import load_model, save_policy
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import decoder_layers, local
from composer_mesh.actors.models.trained_model import frozen_model, trained_model
from composer_mesh.configs.trainer import TrainerConfig
from composer_mesh.planning.model_folder import UnfitModelFolder
from composer_mesh.planning.model_refusals import (
    NoSuchLayers,
    UnfitModel,
    UnknownLayers,
)

ADAPTED = {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "down_proj"]}


@pytest.fixture
def folder(build_model: Any, tokenizer: Any, tmp_path: Path) -> Path:
    save_policy(build_model(1), tokenizer, tmp_path / "policy")
    return tmp_path / "policy"


@pytest.fixture
def build(build_config: Any, folder: Path) -> Any:
    """A model in training, by the keys of the trainer's section."""
    return lambda **trainer: trained_model(build_config(trainer=trainer), folder, Ranks())


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft", exc_type=ModuleNotFoundError)


def stirred(model: Any) -> Any:
    """A model whose adapters do something."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.requires_grad:
                weights.normal_(std=0.2, generator=generator)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(20)[None]).logits
    return found


def test_a_plain_model_is_exported_as_its_own_tensors(build: Any) -> None:
    model = build()
    state = export_state(model)
    assert list(state) == list(model.state_dict())
    assert all(one.data_ptr() == model.state_dict()[name].data_ptr() for name, one in state.items())
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
    assert not any(one.requires_grad for one in state.values())


def test_adapters_alone_learn_and_change_nothing_at_first(
    build: Any, folder: Path, peft: Any
) -> None:
    model, plain = build(lora=ADAPTED), load_model(folder)
    learning = [name for name, one in model.named_parameters() if one.requires_grad]
    assert len(learning) == 2 * 2 * len(decoder_layers(model))
    assert all("lora_" in name for name in learning)
    assert torch.equal(logits(model), logits(plain))


def test_an_export_with_adapters_is_the_model_that_computes(
    build: Any, folder: Path, peft: Any
) -> None:
    model, other = stirred(build(lora=ADAPTED)), load_model(folder)
    names = list(other.state_dict())
    before = logits(other)
    other.load_state_dict(export_state(model))
    assert list(export_state(model)) == names
    torch.testing.assert_close(logits(other), logits(model), rtol=1e-4, atol=1e-4)
    assert float((logits(other) - before).abs().max()) > 0.1


def test_adapters_go_on_from_a_checkpoint_whose_policy_has_them_merged(
    build_config: Any, folder: Path, tmp_path: Path, peft: Any
) -> None:
    config = build_config(trainer={"lora": ADAPTED, "lr": 1e-2})
    learner, rng = Learner(config, folder, Ranks()), random.Random(0)
    batches = [replace(batch_of(load_model(folder), rng), step=step) for step in range(2)]
    learner.train(batches[0], None)
    learner.copy()
    learner.write(tmp_path / "step-1")
    merged = load_model(tmp_path / "step-1")
    assert largest_change(dict(merged.state_dict()), learner.export()) == 0
    other = Learner(config, folder, Ranks())
    other.restore(tmp_path / "step-1")
    for one in (learner, other):
        one.train(batches[1], None)
    assert other.version == 2
    assert largest_change(learner.export(), other.export()) == 0
    wider = build_config(trainer={"lora": {**ADAPTED, "rank": 3}})
    with pytest.raises(OtherAdapters, match=r"lora_A\.default\.weight of shape \(., "):
        Learner(wider, folder, Ranks()).restore(tmp_path / "step-1")
    with pytest.raises(StateOfOtherWeights, match=r"is only in the (checkpoint|model): continue "):
        Learner(build_config(), folder, Ranks()).restore(tmp_path / "step-1")


def test_dropout_of_adapters_is_on_and_that_of_the_model_is_not(build: Any, peft: Any) -> None:
    model = stirred(build(lora={**ADAPTED, "dropout": 0.5}))
    assert not torch.equal(logits(model), logits(model))
    assert torch.equal(logits(stirred(build(lora=ADAPTED))), logits(stirred(build(lora=ADAPTED))))


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("nowhere_proj", "no layer is called nowhere_proj"),
        ("embed_tokens", "embed_tokens is a Embedding"),
        ("lm_head", "lm_head is the head, which losses read without adapters"),
    ],
)
def test_layers_that_can_have_no_adapter_are_refused(
    build: Any, peft: Any, target: str, why: str
) -> None:
    with pytest.raises(NoSuchLayers, match=rf"{why}: name linear layers of the model \("):
        build(lora={"targets": ["q_proj", target]})


def test_layers_that_are_computed_again_have_the_same_gradients(build: Any) -> None:
    plain, wrapped = build(), build(activation_checkpointing=True)
    for model in (plain, wrapped):
        model(input_ids=torch.arange(20)[None]).logits.logsumexp(-1).sum().backward()
    for one, two in zip(plain.parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)
    assert weights_of(plain).keys() == weights_of(wrapped).keys()


def test_attention_without_a_backward_on_the_device_is_refused(build: Any) -> None:
    with pytest.raises(
        UnfitModel, match=r"attention is 'flex' but .* only sdpa and eager have a backward"
    ):
        build(attention="flex")


def test_a_model_without_a_list_of_layers_is_refused(build: Any) -> None:
    model = build()
    model.config.num_hidden_layers = 7
    with pytest.raises(UnknownLayers, match="Qwen3ForCausalLM has no list of 7 decoder layers"):
        decoder_layers(model)


def test_a_refusal_of_layers_crosses_a_process() -> None:
    error = NoSuchLayers(("q_proj",), "none")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("trainer", "sharded"),
    [
        ({}, False),
        ({"ranks": 2}, True),
        ({"ranks": 2, "sharding": "none"}, False),
        ({"compute_dtype": "bfloat16"}, True),
        ({"sharding": "fsdp2"}, True),
    ],
)
def test_auto_shards_where_ranks_are_several_or_halves_compute(
    trainer: dict[str, Any], sharded: bool
) -> None:
    assert TrainerConfig(**trainer).sharded is sharded


@pytest.mark.parametrize(
    ("trainer", "repair"),
    [
        ({"compute_dtype": "bfloat16", "sharding": "none"}, "set sharding to 'auto'"),
        ({"attention": "flash"}, "set compute_dtype to 'bfloat16' or attention to 'sdpa'"),
    ],
)
def test_what_cannot_be_computed_is_refused(trainer: dict[str, Any], repair: str) -> None:
    with pytest.raises(ValidationError, match=repair):
        TrainerConfig(**trainer)


def test_adapters_without_targets_are_on_all_layers_outside_of_fused_experts(
    build_config: Any, tokenizer: Any, peft: Any, tmp_path: Path
) -> None:
    folder = family_folder("deepseek_v3", tokenizer, tmp_path / "mixture")
    config = build_config(trainer={"lora": {"rank": 2}})
    adapted = {name for name, _ in adapted_layers(trained_model(config, folder, Ranks()))}
    assert "model.layers.0.mlp.gate_proj" in adapted
    assert "model.layers.1.mlp.shared_experts.up_proj" in adapted
    assert "model.layers.1.self_attn.kv_b_proj" in adapted
    assert not any("lm_head" in name or name.endswith("experts") for name in adapted)


def test_targets_that_a_mixture_lacks_are_refused_with_the_names_that_work(
    build_config: Any, tokenizer: Any, peft: Any, tmp_path: Path
) -> None:
    folder = family_folder("qwen3_moe", tokenizer, tmp_path / "mixture")
    config = build_config(trainer={"lora": {"rank": 2, "targets": ["q_proj", "gate_proj"]}})
    with pytest.raises(
        NoSuchLayers, match=r"gate_proj: name .* \(k_proj, o_proj, q_proj, v_proj\)"
    ):
        trained_model(config, folder, Ranks())


def test_files_that_lack_a_tensor_are_not_filled_with_random_numbers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnfitModelFolder, match=r"files that lack model\.norm\.weight"):
        load_model(folder)


def test_adapters_of_a_checkpoint_are_loaded_by_peft(
    build_config: Any, folder: Path, tmp_path: Path, peft: Any
) -> None:
    config = build_config(trainer={"lora": ADAPTED, "lr": 1e-2}, policy={"path": folder})
    learner, rng = Learner(config, folder, Ranks()), random.Random(0)
    learner.train(batch_of(load_model(folder), rng), None)
    learner.copy()
    learner.write(tmp_path / "step-1")
    loaded = peft.PeftModel.from_pretrained(load_model(folder), tmp_path / "step-1" / "adapter")
    torch.testing.assert_close(logits(loaded), logits(learner.model))
    assert loaded.peft_config["default"].base_model_name_or_path == str(folder)
    assert not torch.equal(logits(loaded), logits(load_model(folder)))


def test_a_frozen_copy_in_bfloat16_is_half_as_large_and_nearly_the_same(
    build_config: Any, folder: Path
) -> None:
    config = build_config()
    whole, half = (frozen_model(config, folder, Ranks(), one) for one in ("float32", "bfloat16"))
    assert {one.dtype for one in half.parameters()} == {torch.bfloat16}
    assert {one.dtype for one in half.buffers()} == {torch.float32}
    difference = (logits(half).float() - logits(whole)).abs().mean() / logits(whole).std()
    assert 0 < float(difference) < 0.05


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_goes_on_bit_for_bit_from_a_checkpoint_of_each_optimizer(
    build_config: Any, folder: Path, tmp_path: Path, optimizer: str
) -> None:
    config = build_config(trainer={"optimizer": optimizer, "lr": 1e-3})
    learner, rng = Learner(config, folder, Ranks()), random.Random(0)
    batches = [replace(batch_of(load_model(folder), rng), step=step) for step in range(3)]
    learner.train(batches[0], None)
    learner.copy()
    learner.write(tmp_path / "step-1")
    other = Learner(config, folder, Ranks())
    other.restore(tmp_path / "step-1")
    for one in (learner, other):
        for batch in batches[1:]:
            one.train(batch, None)
    assert largest_change(learner.export(), other.export()) == 0


def test_muon_gets_the_matrices_of_layers_alone(build_config: Any, build_model: Any) -> None:
    trainer = build_config(trainer={"optimizer": "muon"}).trainer
    weights = dict(build_model(1).named_parameters())
    muon, adamw = optimizers_of(trainer, weights)
    names = {id(one): name for name, one in weights.items()}
    of_muon = {names[id(one)] for one in muon.param_groups[0]["params"]}
    assert of_muon == {n for n in weights if "layers" in n and weights[n].ndim == 2}
    assert len(adamw.param_groups[0]["params"]) == len(weights) - len(of_muon)


@pytest.mark.parametrize("lora", [None, ADAPTED])
def test_offloaded_inputs_of_layers_change_no_gradient(
    build_config: Any, folder: Path, lora: Any, peft: Any
) -> None:
    found = []
    for offload in (False, True):
        trainer = {"activation_checkpointing": True, "activation_offload": offload, "lora": lora}
        model = stirred(trained_model(build_config(trainer=trainer), folder, Ranks()))
        # A cache would keep keys of the first forward, through which a second one has no gradient.
        model(input_ids=torch.arange(20)[None], use_cache=False).logits.square().mean().backward()
        found.append({n: one.grad for n, one in model.named_parameters() if one.requires_grad})
        assert all(one is not None for one in found[-1].values())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("offload", [False, True])
def test_only_copies_of_offloaded_inputs_wait_for_the_backward(build: Any, offload: bool) -> None:
    model = build(activation_checkpointing=True, activation_offload=offload)
    inputs: list[weakref.ref[Any]] = []
    for layer in decoder_layers(model):
        layer.register_forward_pre_hook(lambda _, given: inputs.append(weakref.ref(given[0])))
    loss = model(input_ids=torch.arange(20)[None], use_cache=False).logits.square().mean()
    assert [one() is None for one in inputs] == [offload] * 2
    loss.backward()


@pytest.mark.parametrize(
    ("family", "lora"), crossed(["gemma3n_text", "gemma4_text"], [None, {"rank": 2}])
)
def test_gradients_that_pass_layers_by_other_arguments_than_their_input_stay(
    build_config: Any, tokenizer: Any, tmp_path: Path, family: str, lora: Any, peft: Any
) -> None:
    """Inputs of each layer of the token itself, and keys and values of an earlier layer."""
    sizes = {
        "num_hidden_layers": 3,
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    }
    if family == "gemma3n_text":
        sizes |= {"intermediate_size": [48] * 3, "activation_sparsity_pattern": [0.0] * 3}
    family_folder(family, tokenizer, tmp_path, **sizes)
    found = []
    for offload in (None, False, True):
        trainer = {"activation_checkpointing": offload is not None, "lora": lora}
        trainer |= {"activation_offload": bool(offload)}
        model = stirred(trained_model(build_config(trainer=trainer), tmp_path, Ranks()))
        model(input_ids=torch.arange(20)[None], use_cache=False).logits.square().mean().backward()
        found.append({n: one.grad for n, one in model.named_parameters() if one.grad is not None})
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_offloaded_inputs_of_shared_prefixes_change_no_weight(
    build_config: Any, folder: Path
) -> None:
    rng, found = random.Random(0), []
    prompt = [rng.randrange(300) for _ in range(40)]
    batch = replace(begun_with(batch_of(load_model(folder), rng), prompt), views=[])
    for offload in (False, True):
        again = {"activation_checkpointing": True, "activation_offload": offload}
        trainer = {"lr": 1e-2, "prefix_sharing": True, "microbatch_tokens": 512, **again}
        learner = Learner(build_config(trainer=trainer), folder, Ranks())
        figures = learner.train(batch, None)
        assert figures["tokens/computed"] < figures["tokens/dense"]
        found.append(weights_of(learner.model))
    assert largest_change(*found) < 1e-6


def test_offloaded_inputs_change_no_balance_of_experts(
    build_config: Any, tokenizer: Any, tmp_path: Path
) -> None:
    family_folder("qwen3_moe", tokenizer, tmp_path)
    found, rng = [], random.Random(0)
    batch = replace(batch_of(load_model(tmp_path), rng), views=[])
    for offload in (False, True):
        again = {"activation_checkpointing": True, "activation_offload": offload}
        trainer = {"lr": 1e-2, "moe": {"load_balancing": 1.0}, **again}
        learner = Learner(build_config(trainer=trainer), tmp_path, Ranks())
        learner.train(batch, None)
        found.append(weights_of(learner.model))
    assert largest_change(*found) < 1e-6


def test_offloading_is_refused_without_checkpointed_layers(build_config: Any) -> None:
    trainer = {"activation_checkpointing": False, "activation_offload": True}
    with pytest.raises(ValidationError, match="only inputs of checkpointed layers are offloaded"):
        build_config(trainer=trainer)


def test_a_checkpoint_of_a_model_that_freezes_some_weights_is_resumed_by_sharded_ranks(
    build_config: Any, tokenizer: Any, tmp_path: Path
) -> None:
    folder = family_folder("ernie4_5_moe", tokenizer, tmp_path / "policy")
    batch = replace(batch_of(load_model(folder), random.Random(0)), views=[])
    found = []
    for sharding in ("none", "fsdp2"):
        learner = Learner(build_config(trainer={"sharding": sharding}), folder, Ranks())
        if found:
            learner.restore(tmp_path / "step-1")
        else:
            learner.train(batch, None)
            learner.copy()
            learner.write(tmp_path / "step-1")
        learner.train(replace(batch, step=1), None)
        found.append({name: local(one).clone() for name, one in learner.export().items()})
    dist.destroy_process_group()
    assert largest_change(*found) < 1e-6


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_padding_that_is_also_the_end_token_learns_its_embedding(
    build_config: Any, build_model: Any, tokenizer: Any, tmp_path: Path, sharding: str
) -> None:
    found = []
    for pad in (0, 5):
        model = build_model(1)
        model.config.pad_token_id = pad
        model.config.eos_token_id = 5
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        save_policy(model, tokenizer, tmp_path / str(pad))
        config = build_config(trainer={"sharding": sharding})
        trained = trained_model(config, tmp_path / str(pad), Ranks())
        trained(input_ids=torch.tensor([[3, 5, 0, 5, 7]])).logits.square().mean().backward()
        found.append(local(trained.get_input_embeddings().weight.grad).clone())
        if dist.is_initialized():
            dist.destroy_process_group()
    assert all(float(found[0][one].abs().max()) > 0 for one in (0, 5))
    assert torch.equal(*found)
