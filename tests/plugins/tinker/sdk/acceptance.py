"""Every call of the Tinker SDK that is served, against the server at an address."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import urllib.request
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types


def done(found: Any) -> Any:
    """Return a client, which older SDKs return at once and newer ones as a future."""
    return found.result() if hasattr(found, "result") else found


def datum(seed: int, length: int = 12, k: int = 0, advantage: float | None = None) -> types.Datum:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, 300, length).tolist()
    targets = rng.integers(3, 300, (length, k) if k else length)
    inputs = {"target_tokens": types.TensorData.from_numpy(targets)}
    if advantage is None:
        inputs["weights"] = types.TensorData.from_numpy(np.ones(targets.shape, np.float32))
    else:
        for name, value in (("logprobs", -5.0), ("advantages", advantage)):
            inputs[name] = types.TensorData.from_numpy(np.full(length, value, np.float32))
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def check_losses(training: Any) -> None:
    out = training.forward_backward([datum(1), datum(2, 9)], "cross_entropy").result()
    assert [one["logprobs"].shape for one in out.loss_fn_outputs] == [[12], [9]]
    total = -sum(float(np.sum(one["logprobs"].data)) for one in out.loss_fn_outputs)
    assert abs(out.metrics["loss:sum"] - total) < 1e-3 * total
    for name in ("importance_sampling", "ppo", "cispo", "gspo", "dro"):
        pair = [datum(1, advantage=1.0), datum(2, 9, advantage=-1.0)]
        assert np.isfinite(training.forward_backward(pair, name).result().metrics["loss:sum"])
    wide = training.forward_backward([datum(5, k=4), datum(6)], "cross_entropy").result()
    assert [one["logprobs"].shape for one in wide.loss_fn_outputs] == [[12, 4], [12]]
    targets = torch.zeros(12, 8, dtype=torch.int64)
    targets[3, 2] = 7
    weights = (targets > 0).float()
    sparse = {
        "target_tokens": types.TensorData.from_torch_sparse(targets),
        "weights": types.TensorData.from_torch_sparse(weights),
    }
    one = types.Datum(model_input=datum(1).model_input, loss_fn_inputs=sparse)
    found = training.forward_backward([one], "cross_entropy").result()
    logprobs = np.reshape(found.loss_fn_outputs[0]["logprobs"].data, (12, 8))
    assert abs(found.metrics["loss:sum"] + logprobs[3, 2]) < 1e-5


def check_custom(training: Any) -> None:
    """A loss of the client's own: its gradient is that of the same loss on the server."""

    def negative(data: Any, logprobs: Any) -> Any:
        loss = -sum(one.sum() for one in logprobs)
        return loss, {"mine": float(loss.detach())}

    data = [datum(1), datum(3, k=3)]
    own = training.forward_backward_custom(data, negative).result()
    theirs = training.forward(data, "cross_entropy").result()
    assert abs(own.metrics["loss:sum"] - theirs.metrics["loss:sum"]) < 1e-3
    chosen, rejected = datum(11), datum(12)

    def dpo(data: Any, logprobs: Any) -> Any:
        margin = logprobs[0].sum() - logprobs[1].sum()
        return -torch.nn.functional.logsigmoid(0.1 * margin), {"margin": float(margin.detach())}

    margins = []
    for _ in range(3):
        margins.append(training.forward_backward_custom([chosen, rejected], dpo).result().metrics)
        training.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    assert margins[-1]["margin"] > margins[0]["margin"]


def check_sampling(service: Any, training: Any, path: str) -> None:
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    settings = types.SamplingParams(max_tokens=8, seed=3)
    own = done(training.save_weights_and_get_sampling_client())
    found = own.sample(prompt, 2, settings, include_prompt_logprobs=True, topk_prompt_logprobs=3)
    found = found.result()
    again = own.sample(prompt, 2, settings).result()
    assert [one.tokens for one in found.sequences] == [one.tokens for one in again.sequences]
    assert found.prompt_logprobs[0] is None
    assert len(found.prompt_logprobs) == 4
    assert [len(one) if one else 0 for one in found.topk_prompt_logprobs] == [0, 3, 3, 3]
    named = done(service.create_sampling_client(model_path=path))
    base = done(service.create_sampling_client(base_model="quickstart"))
    scores = [one.compute_logprobs(prompt).result()[1:] for one in (own, named, base)]
    assert np.allclose(scores[0], scores[1])
    assert not np.allclose(scores[0], scores[2])
    sequence = found.sequences[0]
    whole = types.ModelInput.from_ints([5, 6, 7, 8, *sequence.tokens])
    assert np.allclose(own.compute_logprobs(whole).result()[4:], sequence.logprobs, atol=1e-4)
    data = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.array([6, 7, 8]))},
    )
    trained = training.forward([data], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    assert np.allclose(trained, scores[0], atol=1e-4)


def check_states(service: Any, training: Any) -> None:
    """What is loaded goes on as what was saved."""
    saved = training.save_state("here").result().path
    results = []
    for client in (training, done(service.create_training_client_from_state_with_optimizer(saved))):
        client.forward_backward([datum(n) for n in range(3)], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        results.append(client.forward([datum(9)], "cross_entropy").result().metrics["loss:sum"])
    assert results[0] == results[1], results


def check_rest(service: Any, training: Any, path: str) -> None:
    rest = service.create_rest_client()
    assert path in listed(rest, training)
    runs = rest.list_training_runs().result().training_runs
    assert training.model_id in [one.training_run_id for one in runs]
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 8
    if hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
        url = rest.get_checkpoint_archive_url_from_tinker_path(path).result().url
        with urllib.request.urlopen(url) as answer:
            content = io.BytesIO(answer.read())
        with tarfile.open(fileobj=content) as tar:
            assert sorted(tar.getnames()) == ["adapter_config.json", "adapter_model.safetensors"]
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert path not in listed(rest, training)


def listed(rest: Any, training: Any) -> list[str]:
    found = rest.list_checkpoints(training.model_id).result().checkpoints
    return [one.tinker_path for one in found]


def main(url: str) -> None:
    service = tinker.ServiceClient(base_url=url)
    training = done(service.create_lora_training_client(base_model="quickstart", rank=8, seed=1))
    assert training.get_info().model_data.model_name == "quickstart"
    assert len(training.get_tokenizer().encode("add 3 and 4")) > 2
    check_losses(training)
    check_custom(training)
    path = training.save_weights_for_sampler("snapshot").result().path
    check_sampling(service, training, path)
    check_states(service, training)
    check_rest(service, training, path)
    print(json.dumps({"sdk": tinker.__version__, "passed": True}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
