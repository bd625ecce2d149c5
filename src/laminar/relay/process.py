"""A relay, or the keeper of a chain, as a process of its own: `python -m laminar.relay.process < order.json`.

The order comes over standard input, so that the secret is in no argument list; what happens goes to standard output,
one JSON event a line, the first of them `listening`. It ends with SIGTERM, and when standard input is closed.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from laminar.relay.keeper import ChainKeeper, KeeperRules
from laminar.relay.member import ChainMember, ChainRules
from laminar.relay.server import first_of
from laminar.relay.service import RelayService
from laminar.schema.errors import UserError
from laminar.telemetry.events import Events


class KeepOrder(Struct, frozen=True, kw_only=True, tag="keeper"):
    """Keep a chain."""

    secret: bytes
    host: str = "127.0.0.1"
    port: int = 0
    rules: KeeperRules = KeeperRules()


class RelayOrder(Struct, frozen=True, kw_only=True, tag="relay"):
    """Be one relay of a chain."""

    secret: bytes
    socket_path: str
    keep_versions: int = 2
    rules: ChainRules


Order = KeepOrder | RelayOrder


class PrintedEvents:
    """Events as lines of standard output; `t` is the machine's monotonic clock, for measuring across processes.

    Standard output is ours alone from here on: what libraries print there goes to standard error.
    """

    def __init__(self) -> None:
        sys.stdout.flush()
        self._file = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)

    def emit(self, kind: str, **fields: Any) -> None:
        self._file.write(msgspec.json.encode({"t": time.monotonic(), "kind": kind, **fields}) + b"\n")


async def run_relay(service: RelayService, member: ChainMember) -> None:
    """Serve this machine and take part in the chain; ends: never, cancelled by its parent."""
    async with asyncio.TaskGroup() as group:
        group.create_task(service.run(), name="relay")
        group.create_task(member.run(), name="chain")


async def run(order: Order, events: Events) -> None:
    """Carry out an order; ends: never, cancelled by its parent."""
    async with asyncio.TaskGroup() as group:
        match order:
            case KeepOrder():
                keeper = ChainKeeper(
                    host=order.host, port=order.port, secret=order.secret, rules=order.rules, events=events
                )
                group.create_task(keeper.run())
                await keeper.listening.wait()
                events.emit("listening", host=keeper.address[0], port=keeper.address[1])
            case RelayOrder():
                service = RelayService(
                    socket_path=Path(order.socket_path),
                    secret=order.secret,
                    keep_versions=order.keep_versions,
                    events=events,
                )
                member = ChainMember(service, order.secret, order.rules, events)
                group.create_task(run_relay(service, member))
                await member.listening.wait()
                events.emit("listening", host=member.address[0], port=member.address[1])


async def _main() -> None:
    loop = asyncio.get_running_loop()
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    running = asyncio.ensure_future(run(order, PrintedEvents()))
    loop.add_signal_handler(signal.SIGTERM, running.cancel)
    stdin = sys.stdin.fileno()
    loop.add_reader(stdin, lambda: os.read(stdin, 1) or running.cancel())
    with contextlib.suppress(asyncio.CancelledError):
        await running


def main() -> None:
    """What the user can mend is one sentence and exit code 2; every other error is a traceback."""
    try:
        asyncio.run(_main())
    except* UserError as errors:
        sys.stderr.write(f"laminar: {first_of(errors)}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
