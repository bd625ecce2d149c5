"""One node of a broadcast that is not ours, for benchmarks/relay_chain.py: star, binomial tree, or torch's gloo.

    python relay_peers.py '{"algorithm": "star", "rank": 0, "addresses": [...], "num_bytes": 67108864}'

Prints `ready`, waits for a line on standard input, broadcasts once, prints the machine's monotonic time and a checksum
of what it holds; again until standard input ends.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import xxhash

PORT = 7_400
CONNECT_S = 60.0


def main() -> None:
    order = json.loads(sys.argv[1])
    rank, addresses, num_bytes = order["rank"], order["addresses"], order["num_bytes"]
    payload = np.random.default_rng(0 if rank == 0 else None).integers(0, 256, num_bytes, np.uint8)
    broadcast = {"star": star, "tree": tree, "gloo": gloo}[order["algorithm"]](rank, addresses, payload)
    print("ready", flush=True)
    for line in sys.stdin:
        if rank:
            payload[:] = 0
            if line.strip() == "prepare":
                print("ready", flush=True)
                continue
        elif line.strip() == "prepare":
            print("ready", flush=True)
            continue
        broadcast()
        print(time.monotonic(), xxhash.xxh3_64_hexdigest(payload), flush=True)


def star(rank: int, addresses: list[str], payload: np.ndarray) -> Callable[[], None]:
    """The source sends to all at once."""
    if rank:
        upstream = accept(addresses[rank])
        return lambda: receive(upstream, payload)
    links = [connect(address) for address in addresses[1:]]

    def send() -> None:
        threads = [threading.Thread(target=link.sendall, args=(payload,)) for link in links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return send


def tree(rank: int, addresses: list[str], payload: np.ndarray) -> Callable[[], None]:
    """Binomial: whoever has it sends it on, the number of those doubling with every step."""
    upstream = accept(addresses[rank]) if rank else None
    first = rank.bit_length()
    children = [rank + (1 << step) for step in range(first, 8) if rank + (1 << step) < len(addresses)]
    links = [connect(addresses[child]) for child in children]

    def broadcast() -> None:
        if upstream is not None:
            receive(upstream, payload)
        for link in links:
            link.sendall(payload)

    return broadcast


def gloo(rank: int, addresses: list[str], payload: np.ndarray) -> Callable[[], None]:
    """torch.distributed.broadcast."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{addresses[0]}:{PORT}", rank=rank, world_size=len(addresses))
    tensor = torch.from_numpy(payload)
    return lambda: dist.broadcast(tensor, 0)


def accept(address: str) -> socket.socket:
    with socket.create_server((address, PORT + 1)) as listener:
        return listener.accept()[0]


def connect(address: str) -> socket.socket:
    deadline_s = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection((address, PORT + 1))
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


def receive(link: socket.socket, payload: np.ndarray) -> None:
    view, position = memoryview(payload), 0
    while position < len(view):
        num = link.recv_into(view[position:])
        if not num:
            raise ConnectionError("the sender is gone")
        position += num


if __name__ == "__main__":
    main()
