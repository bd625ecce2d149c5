"""Small random models of each family, and how to run requests on them."""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from laminar.engines.protocol import Output, Request
from laminar.engines.rules import TorchEngineRules
from laminar.engines.torch_runner import TorchRunner
from laminar.schema.trajectories import Sampling

VOCAB = 97
FAMILIES: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def tiny_model(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """A random model whose biases and norms are not the neutral values of a fresh one."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](**{**sizes, **changes})).eval()
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


def runner_for(model: PreTrainedModel, **changes: Any) -> TorchRunner:
    """A runner with the model's weights; it works until everything is done."""
    bounds: dict[str, Any] = {
        "max_running": 16,
        "kv_capacity_tokens": 4096,
        "prefill_chunk_tokens": 256,
        "quantum_s": 1e9,
        "page_tokens": 16,
    }
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        runner = TorchRunner(Path(folder), TorchEngineRules(**{**bounds, **changes}))
    runner.load_weights(1, model.state_dict())
    return runner


def ask(
    name: str,
    prompt: Iterable[int],
    *,
    new: int = 16,
    group: str | None = None,
    num_shared: int | None = None,
    seed: int = 0,
    sampling: Sampling | None = None,
) -> Request:
    prompt = tuple(prompt)
    return Request(
        request_id=name,
        group_id=group or name,
        token_ids=prompt,
        num_shared=len(prompt) if num_shared is None else num_shared,
        num_answered=0,
        max_new_tokens=new,
        stop_token_ids=(),
        sampling=sampling or Sampling(),
        seed=seed,
    )


def random_prompt(seed: int, length: int, vocab: int = VOCAB) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(runner: TorchRunner, requests: list[Request]) -> dict[str, Output]:
    """All answers, each as one output."""
    runner.enqueue(requests)
    runner.run()
    assert runner.load().kv_used_tokens == 0
    return {output.request_id: output for output in runner.collect()}


def joined(outputs: Iterable[Output], request_id: str) -> Output:
    """All reports of one request as one."""
    parts = [output for output in outputs if output.request_id == request_id]
    return Output(
        request_id=request_id,
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
        finish=parts[-1].finish,
    )


def reference_logprobs(model: PreTrainedModel, request: Request, output: Output) -> torch.Tensor:
    """Log-probs of every token at every place of the answer, by transformers; [answer, vocab]."""
    with torch.no_grad():
        logits = model(torch.tensor([request.token_ids + output.token_ids])).logits[0].float()
    temperature = request.sampling.temperature or 1.0
    return torch.log_softmax(logits[len(request.token_ids) - 1 : -1] / temperature, -1)


def largest_error(model: PreTrainedModel, requests: list[Request], outputs: dict[str, Output]) -> float:
    """Largest difference between a reported log-prob and that of transformers."""
    worst = 0.0
    for request in requests:
        output = outputs[request.request_id]
        expected = reference_logprobs(model, request, output)
        chosen = expected.gather(1, torch.tensor(output.token_ids)[:, None]).squeeze(1)
        worst = max(worst, float((chosen - torch.tensor(output.logprobs)).abs().max()))
    return worst
