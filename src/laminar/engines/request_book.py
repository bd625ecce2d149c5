"""Every request from `submit` to its last report, whichever engine computes its tokens.

Invariant: a request is in the book until an output with `finish` was handed out, so nothing that was drawn is lost when
a step is cancelled. `enqueue` and `load` may be called while another thread plans and computes.
"""

from collections import deque
from collections.abc import Callable, Sequence

from laminar.engines.batching import Batcher, BatchRules, LiveRequest, enliven
from laminar.engines.protocol import EngineLoad, Output, Request


class RequestBook:
    """Owns the batcher; the engine asks it for plans and tells it which tokens were drawn."""

    def __init__(self, rules: BatchRules) -> None:
        self.batcher = Batcher(rules)
        self._lives: dict[str, LiveRequest] = {}
        self._inbox: deque[LiveRequest] = deque()  # bounded by the caller, who holds every request anyway

    def __len__(self) -> int:
        return len(self._lives)

    def enqueue(self, requests: Sequence[Request]) -> None:
        """Queue all of them or, with a ValueError, none."""
        fresh: dict[str, LiveRequest] = {}
        for request in requests:
            if len(request.token_ids) < 1 or request.max_new_tokens < 1:
                raise ValueError(f"request {request.request_id} needs at least 1 token and room for at least 1 new one")
            if request.request_id in self._lives or request.request_id in fresh:
                raise ValueError(f"request {request.request_id} is already queued")
            self.batcher.check(request)
            fresh[request.request_id] = enliven(request)
        self._lives.update(fresh)
        self._inbox.extend(fresh.values())

    def take_in(self) -> bool:
        """Move new requests to the batcher; returns whether there is anything to compute.

        Each is in one of the queues at all times, so a concurrent `load` may count one twice but misses none.
        """
        while self._inbox:
            self.batcher.submit([self._inbox[0]])
            self._inbox.popleft()
        return bool(self.batcher.waiting or self.batcher.running)

    def collect(self) -> list[Output]:
        """Report what is new and forget what has ended."""
        outputs = [live.take_output() for live in self._lives.values() if live.fresh_ids or live.finish]
        for output in outputs:
            if output.finish is not None:
                del self._lives[output.request_id]
        return outputs

    def abort(self, request_ids: Sequence[str] | None, forget: Callable[[LiveRequest], None]) -> list[Output]:
        """Stop requests (None: all) where they are; `forget` lets the engine drop what it keeps about one."""
        self.take_in()
        outputs = []
        for request_id in list(self._lives) if request_ids is None else request_ids:
            live = self._lives.pop(request_id, None)
            if live is None:
                continue
            if live.finish is None:
                forget(live)
                self.batcher.remove(live)
                live.finish = "aborted"
            outputs.append(live.take_output())
        return outputs

    def load(self) -> EngineLoad:
        batcher, page_tokens = self.batcher, self.batcher.rules.page_tokens
        return EngineLoad(
            num_running=len(batcher.running),
            num_waiting=len(batcher.waiting) + len(self._inbox),
            kv_used_tokens=batcher.num_pages_used * page_tokens,
            kv_capacity_tokens=batcher.rules.num_pages * page_tokens,
            num_preempted=batcher.num_preempted,
        )
