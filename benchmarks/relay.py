"""Weights over one machine's relay, beside what they would be moved by otherwise; prints one JSON line.

    python benchmarks/relay.py                       # a 1 GiB model of 302 tensors, and the shapes of SmolLM2-135M
    python benchmarks/relay.py --mib 4096 --only relay file
    GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x100000 python benchmarks/relay.py

What the times mean: `laminar.relay.benchmark`. Peers move the same tensors in the same run: `file` is torch.save and
torch.load over /dev/shm, `ray` the object store (put here, get in another process), `gloo` a broadcast from one process
to another; `tcp` sends versions from one relay to the next over unshaped loopback, with iperf3 beside it.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laminar.relay import benchmark
from laminar.relay.benchmark import SECRET, Model, Options, seconds, started
from laminar.relay.member import ChainRules
from laminar.relay.process import KeepOrder, RelayOrder
from laminar.relay.publisher import WeightPublisher

PORT = 7_600
IPERF_S = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the large model")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--threads", type=int, help="copy threads of the publisher; default: as it chooses")
    parser.add_argument("--dtype", default="keep", choices=["keep", "bfloat16"], help="cast to this on the way")
    parser.add_argument("--only", nargs="+", default=["relay", "file", "gloo", "ray", "tcp"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rules = Options(repeat=options.repeat, threads=options.threads, dtype=options.dtype)
    models = {
        f"{options.mib} MiB": benchmark.large_model(options.mib << 20, options.dtype),
        "SmolLM2-135M": benchmark.smollm2_135m(),
    }
    rows = []
    for name, model in models.items():
        row = benchmark.measure(name, model, rules) if "relay" in options.only else {"model": name}
        for peer, measure in (("file", over_file), ("gloo", over_gloo), ("ray", over_ray)):
            if peer in options.only:
                row[peer] = measure(model, max(1, options.repeat // 3))
        rows.append(row)
    result: dict[str, Any] = {
        "benchmark": "relay",
        "machine": benchmark.machine(),
        "dtype": options.dtype,
        "rows": rows,
    }
    result["machine"]["tunables"] = os.environ.get("GLIBC_TUNABLES", "")
    if "tcp" in options.only:
        result["tcp"] = over_tcp(options.mib, options.repeat)
    print(json.dumps(result))


def over_file(model: Model, repeat: int) -> dict[str, float]:
    """A file in memory, written by one process and read by the other."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    saves, loads = [], []
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name) / "weights.pt"
        for _ in range(repeat):
            saves.append(seconds(lambda: torch.save(model, path)))
            loads.append(seconds(lambda: torch.load(path)))
    return milliseconds(save=saves, load=loads)


def over_gloo(model: Model, repeat: int) -> dict[str, float]:
    """torch.distributed.broadcast of every tensor; the time of the sender, who waits for the receiver."""
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in model.items()}
    context = multiprocessing.get_context("spawn")
    receiver = context.Process(target=gloo_rank, args=(1, shapes, repeat, None))
    receiver.start()
    times: list[float] = []
    gloo_rank(0, shapes, repeat, model, times)
    receiver.join()
    return milliseconds(broadcast=times[1:])


def gloo_rank(rank: int, shapes: dict, repeat: int, model: Model | None, times: list[float] | None = None) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{PORT}", rank=rank, world_size=2)
    tensors = model or {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    unique = list({name: t for name, t in tensors.items() if name != "head"}.values())
    for _ in range(repeat + 1):
        dist.barrier()
        started_s = time.perf_counter()
        for tensor in unique:
            dist.broadcast(tensor.view(torch.uint8) if tensor.dim() else tensor, 0)
        dist.barrier()
        if times is not None:
            times.append(time.perf_counter() - started_s)
    dist.destroy_process_group()


def over_ray(model: Model, repeat: int) -> dict[str, float]:
    """Ray's object store, which takes numpy arrays without a copy too many but not torch tensors."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    num_bytes = sum(tensor.nbytes for tensor in model.values())
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=4 * num_bytes + (200 << 20),
        include_dashboard=False,
        logging_level="ERROR",
    )

    @ray.remote
    class Replica:
        def load(self, reference: list) -> float:
            started_s = time.perf_counter()
            arrays = ray.get(reference[0])
            own = [array.copy() for array in arrays]
            return time.perf_counter() - started_s + 0 * len(own)

    arrays = [tensor.view(torch.uint8).numpy() for name, tensor in model.items() if name != "head"]
    replica = Replica.remote()
    puts, gets = [], []
    for _ in range(repeat + 1):
        started_s = time.perf_counter()
        reference = ray.put(arrays)
        puts.append(time.perf_counter() - started_s)
        gets.append(ray.get(replica.load.remote([reference])))
        del reference
    ray.shutdown()
    return milliseconds(put=puts[1:], get_and_copy=gets[1:])


def over_tcp(mib: int, repeat: int) -> dict[str, Any]:
    """From one relay to the next over loopback, and what iperf3 reaches with one stream just before and after."""
    iperf = [iperf_gib_per_s()]
    with tempfile.TemporaryDirectory() as folder, started(KeepOrder(secret=SECRET)) as keeper:
        orders = [
            RelayOrder(
                secret=SECRET,
                socket_path=f"{folder}/{name}",
                rules=ChainRules(
                    relay_id=name, keeper_host=keeper.host, keeper_port=keeper.port, with_deltas=False, beat_s=0.2
                ),
            )
            for name in ("first", "second")
        ]
        with started(orders[0]):
            keeper.until(lambda event: event["kind"] == "chain_changed")
            with started(orders[1]) as second:
                keeper.until(lambda event: event["kind"] == "chain_changed")
                rates = asyncio.run(tcp_rates(Path(folder) / "first", second, mib, repeat))
    iperf.append(iperf_gib_per_s())
    result: dict[str, Any] = {"link_GiB_per_s": round(statistics.median(rates), 2), "best": round(max(rates), 2)}
    known = [rate for rate in iperf if rate]
    if known:
        result |= {
            "iperf3_GiB_per_s": [round(rate, 2) for rate in known],
            "link / iperf3": round(statistics.median(rates) / statistics.median(known), 2),
        }
    return result


async def tcp_rates(path: Path, second: benchmark.Started, mib: int, repeat: int) -> list[float]:
    rates = []
    async with WeightPublisher(path, SECRET, rules=benchmark.RULES) as publisher:
        for version in range(benchmark.WARM_UP + repeat):
            bits = np.random.default_rng(version).integers(0, 1 << 62, mib << 17)
            await publisher.publish(version, {"w": torch.from_numpy(bits)})
            arrived = second.until(lambda e, v=version: e["kind"] == "weights_arrived" and e["version"] == v)
            if version >= benchmark.WARM_UP:
                rates.append(arrived["num_bytes"] / 2**30 / arrived["seconds"])
    return rates


def iperf_gib_per_s() -> float | None:
    """One stream over loopback; None if the program is not installed."""
    if shutil.which("iperf3") is None:
        return None
    with subprocess.Popen(["iperf3", "-s", "-1", "-p", str(PORT + 1)], stdout=subprocess.DEVNULL) as server:
        try:
            for _ in range(50):
                command = ["iperf3", "-c", "127.0.0.1", "-p", str(PORT + 1), "-t", str(IPERF_S), "-J"]
                done = subprocess.run(command, capture_output=True, text=True)
                received = json.loads(done.stdout or "{}").get("end", {}).get("sum_received")
                if received is not None:
                    return float(received["bits_per_second"]) / 8 / 2**30
                time.sleep(0.1)
        finally:
            server.kill()
    return None


def milliseconds(**times: list[float]) -> dict[str, float]:
    return {f"{name}_ms": round(statistics.median(values) * 1e3, 1) for name, values in times.items()}


if __name__ == "__main__":
    main()
