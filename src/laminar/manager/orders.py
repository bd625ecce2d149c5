"""Orders to the cluster layer, which owns processes."""

import asyncio

from msgspec import Struct


class StartOrder(Struct, frozen=True, kw_only=True, tag="start"):
    """Start a life of a replica."""

    replica_id: str
    incarnation: int


class KillOrder(Struct, frozen=True, kw_only=True, tag="kill"):
    """End a life of a replica, whatever it does."""

    replica_id: str
    incarnation: int
    reason: str


class GiveUpOrder(Struct, frozen=True, kw_only=True, tag="give_up"):
    """The run cannot go on."""

    reason: str


Order = StartOrder | KillOrder | GiveUpOrder


class OrderQueue:
    """Orders wait here until the cluster layer takes them; bounded by the number of replicas and their restarts."""

    def __init__(self) -> None:
        self._orders: list[Order] = []
        self._some = asyncio.Event()

    def put(self, order: Order) -> None:
        self._orders.append(order)
        self._some.set()

    async def take(self, wait_s: float) -> tuple[Order, ...]:
        """All orders; waits up to `wait_s` for the first."""
        if not self._orders:
            self._some.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._some.wait()
            except TimeoutError:
                return ()
        orders, self._orders = tuple(self._orders), []
        return orders
