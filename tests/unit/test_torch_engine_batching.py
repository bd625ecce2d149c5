"""Admission, preemption and page ownership, without a model."""

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.engines.batching import Batcher, BatchRules, LiveRequest, Plan, enliven
from laminar.engines.protocol import Request
from laminar.schema.trajectories import Sampling


def request(name: str, *, prompt: int, new: int, group: str = "g", shared: int = 0) -> LiveRequest:
    return enliven(
        Request(
            request_id=name,
            group_id=group,
            token_ids=tuple(range(prompt)),
            num_shared=shared,
            num_answered=0,
            max_new_tokens=new,
            stop_token_ids=(),
            sampling=Sampling(),
            seed=0,
        )
    )


def rules(**changes: int) -> BatchRules:
    return BatchRules(**{"max_running": 4, "num_pages": 10, "page_tokens": 4, "prefill_chunk_tokens": 8, **changes})


def finish_iteration(batcher: Batcher) -> None:
    """Everyone who decodes draws a token."""
    for live in batcher.decoding():
        live.append(0, 0.0)
        if live.finish is not None:
            batcher.remove(live)


class Simulated:
    """Plays the engine: tracks which token positions of which request each page holds."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.content: dict[int, dict[int, tuple[str, int]]] = {}
        self.was_dropped: set[str] = set()

    def write(self, live: LiveRequest, position: int) -> None:
        page_tokens = self.batcher.rules.page_tokens
        page = live.pages[position // page_tokens]
        self.content.setdefault(page, {})[position % page_tokens] = (live.request.group_id, position)

    def iterate(self) -> Plan:
        batcher, page_tokens = self.batcher, self.batcher.rules.page_tokens
        plan = batcher.plan()
        owned = [page for live in batcher.running for page in live.pages]
        assert len(owned) == len(set(owned)) == batcher.num_pages_used <= batcher.rules.num_pages
        assert 0 not in owned
        assert len(batcher.running) <= batcher.rules.max_running
        assert sum(chunk.stop - chunk.start for chunk in plan.chunks) <= batcher.rules.prefill_chunk_tokens
        for source, target in plan.page_copies:
            self.content[target] = dict(self.content[source])
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.stop):
                self.write(chunk.live, position)
        for live in batcher.decoding():
            self.write(live, len(live.token_ids) - 1)
            for position in range(len(live.token_ids)):  # attention reads all of them: they must be there
                page = live.pages[position // page_tokens]
                assert self.content[page][position % page_tokens][1] == position, (live, position)
        self.was_dropped |= {live.request.request_id for live in plan.dropped}
        finish_iteration(batcher)
        return plan


@st.composite
def workloads(draw: st.DrawFn) -> tuple[BatchRules, list[LiveRequest]]:
    bounds = BatchRules(
        max_running=draw(st.integers(1, 6)),
        num_pages=draw(st.integers(4, 24)),
        page_tokens=draw(st.integers(1, 8)),
        prefill_chunk_tokens=draw(st.integers(1, 20)),
    )
    capacity = bounds.num_pages * bounds.page_tokens
    lives = []
    for index in range(draw(st.integers(1, 14))):
        prompt = draw(st.integers(1, capacity - 1))
        new = draw(st.integers(1, min(40, capacity - prompt)))
        shared = draw(st.sampled_from([0, prompt, prompt // 2]))
        lives.append(request(f"r{index}", prompt=prompt, new=new, group=f"g{index % 3}", shared=shared))
    return bounds, lives


@settings(max_examples=150, deadline=None)
@given(workloads())
def test_every_request_finishes_within_the_bounds(workload):
    bounds, lives = workload
    batcher = Batcher(bounds)
    engine = Simulated(batcher)
    for live in lives:
        batcher.check(live.request)
    batcher.submit(lives)
    # Each iteration advances at least the oldest running request, which is never dropped.
    longest = sum(len(live.token_ids) + live.request.max_new_tokens for live in lives) + len(lives)
    for _ in range(longest):
        if not batcher.running and not batcher.waiting:
            break
        engine.iterate()
    assert [live.finish for live in lives] == ["length"] * len(lives)
    assert all(len(live.fresh_ids) == live.request.max_new_tokens for live in lives)
    assert batcher.num_pages_used == 0
    assert bool(engine.was_dropped) == bool(batcher.num_preempted)


def test_the_newest_is_pushed_out_and_is_the_next_to_return():
    batcher = Batcher(rules(num_pages=4, max_running=2))
    batcher.submit(
        [request("old", prompt=4, new=12), request("new", prompt=8, new=4), request("last", prompt=4, new=1)]
    )
    engine = Simulated(batcher)
    while not batcher.num_preempted:
        engine.iterate()
    assert [live.request.request_id for live in batcher.running] == ["old"]
    assert [live.request.request_id for live in batcher.waiting] == ["new", "last"]
    assert batcher.waiting[0].num_computed == 0
    assert batcher.waiting[0].fresh_ids, "tokens that were drawn are kept"


def test_a_groups_prompt_is_computed_once_and_copied():
    batcher = Batcher(rules(num_pages=60, max_running=10))
    batcher.submit([request(f"r{i}", prompt=17, new=3, shared=17) for i in range(8)])
    plans = []
    while batcher.running or batcher.waiting:
        plans.append(batcher.plan())
        finish_iteration(batcher)
    assert sum(chunk.stop - chunk.start for plan in plans for chunk in plan.chunks) == 16
    assert sum(len(plan.page_copies) for plan in plans) == 7 * 4


def test_prompts_that_differ_are_not_shared_even_in_one_group():
    batcher = Batcher(rules(num_pages=60, prefill_chunk_tokens=100))
    batcher.submit([request("a", prompt=9, new=3, shared=9), request("b", prompt=10, new=3, shared=10)])
    assert [(chunk.start, chunk.stop) for chunk in batcher.plan().chunks] == [(0, 8), (0, 9)]


def test_decoding_goes_on_while_a_long_prompt_is_prefilled():
    batcher = Batcher(rules(num_pages=60))
    batcher.submit([request("short", prompt=2, new=50), request("long", prompt=100, new=1)])
    for _ in range(12):
        batcher.plan()
        finish_iteration(batcher)
    short, long = batcher.running
    assert len(short.fresh_ids) == 12
    assert long.num_computed >= 8 * 11 - 1


def test_compaction_makes_the_pages_in_use_the_lowest_ones():
    batcher = Batcher(rules(num_pages=40, max_running=8))
    lives = [request(f"r{i}", prompt=12, new=20) for i in range(6)]
    batcher.submit(lives)
    engine = Simulated(batcher)
    while len(batcher.decoding()) < 6:
        engine.iterate()
    for live in lives[:4]:
        batcher.remove(live)
    before = {live: list(live.pages) for live in batcher.running}
    moves = batcher.compact()
    for live, pages in before.items():
        assert live.pages == [moves.get(page, page) for page in pages]
    assert sorted(page for live in batcher.running for page in live.pages) == list(range(1, batcher.num_pages_used + 1))
    assert not set(moves) & set(moves.values())
    for old, new in moves.items():
        engine.content[new] = engine.content[old]
    engine.iterate()
