"""How long a version takes to all machines, over links of a given rate; prints one JSON line and draws the plot.

    python benchmarks/relay_chain.py                           # chain, star, tree and gloo; 2 to 16 machines; root
    python benchmarks/relay_chain.py --only chain --machines 8 --link nixl
    python benchmarks/relay_chain.py --plot docs/images/relay-chain.png

Machines are network namespaces (`laminar.relay.netns`). Every time is from the call that publishes, or starts the
broadcast, to the last machine having all bytes, checked. `model` is S/B + (N-2)c/B with B the rate of the link less TCP
and Ethernet headers, and c our chunk size.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from laminar.relay import netns
from laminar.relay.client import ClientRules
from laminar.relay.member import ChainRules
from laminar.relay.process import KeepOrder, RelayOrder
from laminar.relay.publisher import WeightPublisher

SECRET = b"benchmark"
PAYLOAD_SHARE = 1448 / 1514
"""What TCP and Ethernet headers leave of a link's rate."""

WARM_UP = 3
"""Versions until every slot is warm and the chunks are cut by what the links were measured to take."""

PEERS = Path(__file__).parent / "relay_peers.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--only", nargs="+", default=["chain", "tree", "star", "gloo"])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--mbit", type=float, default=400.0)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--link", default="tcp", choices=["tcp", "nixl"])
    parser.add_argument("--chunk-kib", type=int, default=0, help="0: as the relays choose")
    parser.add_argument("--plot", type=Path, help="write a picture")
    options = parser.parse_args()
    reason = netns.missing()
    if reason is not None:
        sys.exit(f"no namespaces here: {reason}")
    rows = []
    for num in options.machines:
        for algorithm in options.only:
            repeat = options.repeat if algorithm == "chain" else max(1, options.repeat // 2)
            row = chain(num, options) if algorithm == "chain" else peer(algorithm, num, repeat, options)
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    payload_s = options.mib * 2**20 * 8 / (options.mbit * 1e6)
    setting = {"mib": options.mib, "mbit_per_s": options.mbit, "payload_s": round(payload_s, 3), "link": options.link}
    print(json.dumps({"benchmark": "relay_chain", "machine": machine(), "setting": setting, "rows": rows}))
    if options.plot:
        draw(rows, payload_s, setting, options.plot)


def chain(num: int, options: argparse.Namespace) -> dict[str, Any]:
    """Our relays."""
    with (
        tempfile.TemporaryDirectory() as folder,
        netns.lab(num, mbit_per_s=options.mbit) as lab,
        chain_processes(Path(folder), lab, options) as (processes, socket_path),
    ):
        times, chunk_bytes = asyncio.run(publish(socket_path, processes, options))
    rate = options.mbit * 1e6 / 8 * PAYLOAD_SHARE
    model_s = options.mib * 2**20 / rate + max(0, num - 2) * chunk_bytes / rate
    return row("chain", num, times) | {"chunk_kib": chunk_bytes >> 10, "model_s": round(model_s, 3)}


@contextlib.contextmanager
def chain_processes(folder: Path, lab: netns.Lab, options: argparse.Namespace) -> Iterator[tuple[list[Any], Path]]:
    """A keeper and a relay on the first machine, a relay on each other one."""
    with contextlib.ExitStack() as stack:
        first = lab.machines[0]
        keeper = stack.enter_context(started(KeepOrder(secret=SECRET, host=first.address), first))
        host, port = keeper.first["host"], keeper.first["port"]
        relays = []
        for at, place in enumerate(lab.machines):
            rules = ChainRules(
                relay_id=f"relay-{at:02}",
                machine=place.name,
                host=place.address,
                keeper_host=host,
                keeper_port=port,
                link=options.link,
                chunk_bytes=options.chunk_kib << 10 or None,
                with_deltas=False,
                beat_s=0.2,
            )
            order = RelayOrder(secret=SECRET, socket_path=str(folder / str(at)), rules=rules)
            relays.append(stack.enter_context(started(order, place)))
            keeper.until(lambda e, n=at + 1: e["kind"] == "chain_changed" and len(e["order"]) == n)
        yield relays, folder / "0"


class Started:
    """A process of ours and the events that it prints."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        self.first = self.until(lambda event: event["kind"] == "listening")

    def until(self, condition) -> dict[str, Any]:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            event: dict[str, Any] = json.loads(line)
            if condition(event):
                return event
        sys.exit("a relay process ended")


@contextlib.contextmanager
def started(order: KeepOrder | RelayOrder, place: netns.Machine) -> Iterator[Started]:
    command = [*place.prefix, sys.executable, "-m", "laminar.relay.process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(order) + b"\n")
        child.stdin.flush()
        try:
            yield Started(child)
        finally:
            child.kill()


async def publish(socket_path: Path, processes: list[Started], options: argparse.Namespace) -> tuple[list[float], int]:
    """Publish beside the master; seconds until the last relay holds each version, and the size of its chunks."""
    times = []
    chunk_bytes = options.chunk_kib << 10
    async with WeightPublisher(socket_path, SECRET, rules=ClientRules(connect_s=60.0)) as publisher:
        for version in range(WARM_UP + options.repeat):
            bits = np.random.default_rng(version).integers(0, 1 << 15, options.mib << 19).astype(np.int16)
            tensors = {f"w{at}": torch.from_numpy(part) for at, part in enumerate(np.split(bits, 64))}
            started_s = time.monotonic()
            await publisher.publish(version, tensors)
            arrived = [
                process.until(lambda e, v=version: e["kind"] == "weights_arrived" and e["version"] == v)
                for process in processes[1:]
            ]
            if version >= WARM_UP:
                times.append(max(event["t"] for event in arrived) - started_s)
            chunk_bytes = arrived[0]["chunk_bytes"]
            await asyncio.sleep(0.5)  # a beat: the relays report what the links take
    return times, chunk_bytes


def peer(algorithm: str, num: int, repeat: int, options: argparse.Namespace) -> dict[str, Any]:
    """Somebody else's broadcast of as many bytes."""
    with netns.lab(num, mbit_per_s=options.mbit) as lab, contextlib.ExitStack() as stack:
        addresses = [place.address for place in lab.machines]
        order = {"algorithm": algorithm, "addresses": addresses, "num_bytes": options.mib << 20}
        children = []
        for rank, place in enumerate(lab.machines):
            command = [*place.prefix, sys.executable, str(PEERS), json.dumps(order | {"rank": rank})]
            child = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(child.kill)
            children.append(child)
        times = []
        answers(children)
        for _ in range(repeat + 1):
            tell(children, "prepare")
            started_s = time.monotonic()
            tell(children, "go", wait=False)
            done = [answer.split() for answer in answers(children)]
            if len({checksum for _, checksum in done}) != 1:
                sys.exit(f"{algorithm}: the machines hold different bytes")
            times.append(max(float(at_s) for at_s, _ in done) - started_s)
    return row(algorithm, num, times[1:])


def tell(children: list[subprocess.Popen[str]], line: str, *, wait: bool = True) -> None:
    for child in children:
        assert child.stdin is not None
        child.stdin.write(line + "\n")
        child.stdin.flush()
    if wait:
        answers(children)


def answers(children: list[subprocess.Popen[str]]) -> list[str]:
    lines = [child.stdout.readline() for child in children if child.stdout is not None]
    if not all(lines):
        sys.exit("a node of the broadcast ended")
    return lines


def row(algorithm: str, num: int, times: list[float]) -> dict[str, Any]:
    return {
        "algorithm": algorithm,
        "machines": num,
        "median_s": round(statistics.median(times), 3),
        "min_s": round(min(times), 3),
        "max_s": round(max(times), 3),
        "runs": len(times),
    }


def draw(rows: list[dict[str, Any]], payload_s: float, setting: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for algorithm in dict.fromkeys(entry["algorithm"] for entry in rows):
        mine = [entry for entry in rows if entry["algorithm"] == algorithm]
        axes.plot([e["machines"] for e in mine], [e["median_s"] for e in mine], marker="o", label=algorithm)
    axes.axhline(payload_s, color="grey", linestyle=":", label="payload / link rate")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(
        sorted({entry["machines"] for entry in rows}), [str(e) for e in sorted({r["machines"] for r in rows})]
    )
    axes.set_xlabel("machines")
    axes.set_ylabel("seconds to the last machine")
    axes.set_title(f"{setting['mib']} MiB over links of {setting['mbit_per_s']:g} Mbit/s")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def machine() -> dict[str, object]:
    return {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}


if __name__ == "__main__":
    main()
