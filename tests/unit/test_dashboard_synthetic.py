"""A run that looks like a real one, for the tests of everything that shows runs: 40 steps, 3 replicas, 90 s."""

import heapq
import math
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from laminar.telemetry.vocabulary import KINDS, problem

GROUP_SIZE = 8
BATCH = 64
GROUPS_PER_STEP = 8
NUM_STEPS = 40
BEGIN = 1_760_000_000.0


class Run:
    """Three replicas, a trainer and a manager as a toy simulation; `events` is what they would have emitted."""

    def __init__(self, seed: int = 0, *, num_steps: int = NUM_STEPS) -> None:
        self.events: list[dict[str, Any]] = []
        self.rng = random.Random(seed)
        self.num_steps = num_steps
        self.t = 0.0
        self.queue: list[tuple[float, int, Any]] = []
        self.order = 0
        self.version = 0
        self.ready: list[dict[str, Any]] = []
        self.replicas = {f"replica-{i}": Replica(f"replica-{i}") for i in range(3)}
        self.num_groups = 0
        self.training = False
        self.asked = 0.0
        self.finished = False
        self.evaluations_due = [0]
        self.group_progress: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def emit(self, source: str, kind: str, **fields: Any) -> None:
        self.events.append({"t": BEGIN + self.t, "source": source, "kind": kind, **fields})

    def at(self, t: float, action: Any) -> None:
        self.order += 1
        heapq.heappush(self.queue, (t, self.order, action))

    def play(self) -> list[dict[str, Any]]:
        self.emit("cluster", "run_started", run_id="r-1", name="synthetic", num_replicas=3, num_steps=self.num_steps)
        self.at(3.0, lambda: self.publish(0))
        for i, replica in enumerate(self.replicas.values()):
            self.at(3.4 + 0.15 * i, lambda r=replica: self.start(r))
        for step in range(120):
            self.at(5.0 + 1.0 * step, self.look)
        self.at(46.0, lambda: self.kill(self.replicas["replica-1"]))
        while self.queue and not self.finished:
            self.t, _, action = heapq.heappop(self.queue)
            action()
        self.emit("cluster", "run_finished", reason="finished")
        return self.events

    # ---- replicas

    def start(self, replica: "Replica") -> None:
        replica.alive = True
        replica.incarnation += 1
        self.emit("manager", "replica_started", replica_id=replica.name, incarnation=replica.incarnation)
        self.cycle(replica)

    def cycle(self, replica: "Replica") -> None:
        if replica.version != self.version:
            seconds = self.rng.uniform(0.08, 0.2)
            self.t += seconds
            replica.version = self.version
            me = {"replica_id": replica.name, "incarnation": replica.incarnation}
            self.emit(
                replica.name, "pulled", **me, version=self.version, seconds=seconds, freed_by_repack=replica.freed
            )
        replica.freed = False
        replica.cycle += 1
        purpose = "evaluation" if self.evaluations_due and self.evaluations_due[0] <= self.version else "training"
        if purpose == "training" and len(self.ready) > 4 * GROUPS_PER_STEP * GROUP_SIZE:
            self.at(self.t + 0.5, lambda inc=replica.incarnation: self.again(replica, inc))
            return
        version = self.evaluations_due.pop(0) if purpose == "evaluation" else replica.version
        self.emit(
            "data", "claimed", lease_id=replica.lease, version=replica.version, num_trajectories=BATCH, purpose=purpose
        )
        replica.started, replica.num_started, replica.purpose = self.t, BATCH, purpose
        for i in range(BATCH // GROUP_SIZE):
            self.num_groups += purpose == "training"
            group = f"g{self.num_groups}" if purpose == "training" else f"e{version}-{i}"
            for j in range(GROUP_SIZE):
                self.begin(replica, f"{group}.{j}", group, self.length())
        replica.evaluated = version

    def again(self, replica: "Replica", incarnation: int) -> None:
        if replica.alive and replica.incarnation == incarnation:
            replica.cycle -= 1
            self.cycle(replica)

    def length(self) -> int:
        growth = 1 + 0.6 * self.version / NUM_STEPS
        if self.rng.random() < 0.12:
            return int(self.rng.gauss(430, 60) * growth)
        return max(8, int(self.rng.lognormvariate(math.log(110), 0.5) * growth))

    def begin(self, replica: "Replica", trajectory: str, group: str, tokens: int, attempt: int = 1) -> None:
        item = {"id": trajectory, "group": group, "tokens": tokens, "version": replica.version, "attempt": attempt}
        replica.running[trajectory] = item
        item["ends"] = self.t + tokens * self.rng.uniform(0.0072, 0.0092)
        self.at(item["ends"], lambda: self.finish(replica, item))

    def finish(self, replica: "Replica", item: dict[str, Any]) -> None:
        if replica.running.get(item["id"]) is not item:
            return
        del replica.running[item["id"]]
        accuracy = 0.12 + 0.78 * (1 - math.exp(-item["version"] / 14))
        reward = float(self.rng.random() < accuracy)
        staleness = self.version - item["version"]
        dropped = self.rng.random() < 0.002
        purpose = "evaluation" if item["group"].startswith("e") else "training"
        self.emit(
            "data",
            "trajectory",
            trajectory_id=item["id"],
            group_id=item["group"],
            version=item["version"],
            staleness=staleness,
            tokens=item["tokens"],
            reward=None if dropped else reward,
            purpose=purpose,
            attempt=item["attempt"],
            stop_reason="stop" if item["tokens"] < 700 else "length",
        )
        if dropped:
            self.emit("data", "dropped", trajectory_id=item["id"], reason="reward failed: sandbox timeout")
        if purpose == "training":
            members = self.group_progress[item["group"]]
            members.append({**item, "staleness": staleness, "reward": reward})
            if len(members) == GROUP_SIZE:
                self.ready.extend(self.group_progress.pop(item["group"]))
                self.maybe_train()
        if not replica.running:
            self.done(replica)

    def done(self, replica: "Replica") -> None:
        me = {"replica_id": replica.name, "incarnation": replica.incarnation}
        seconds = self.t - replica.started
        self.emit(
            replica.name,
            "batch_done",
            **me,
            lease_id=replica.lease,
            version=replica.version,
            num_trajectories=replica.num_started,
            seconds=seconds,
        )
        if replica.purpose == "evaluation":
            accuracy = 0.1 + 0.78 * (1 - math.exp(-replica.version / 14)) + self.rng.gauss(0, 0.012)
            self.emit("data", "evaluation", version=replica.evaluated, accuracy=round(accuracy, 4), num=BATCH)
        self.cycle(replica)

    def look(self) -> None:
        """Heartbeats, then a repack if two tails of one version fit together."""
        for replica in self.replicas.values():
            if replica.alive:
                num = len(replica.running)
                self.emit(
                    replica.name,
                    "load",
                    replica_id=replica.name,
                    incarnation=replica.incarnation,
                    phase="generating" if num else "idle",
                    version=replica.version,
                    lease_id=replica.lease,
                    num_running=min(num, 48),
                    num_waiting=max(0, num - 48),
                    num_acting=0,
                    kv_fraction=round(num / 70, 3),
                )
        tails = [r for r in self.replicas.values() if r.alive and 0 < len(r.running) <= 14 and r.purpose == "training"]
        for source in tails:
            targets = [r for r in tails if r is not source and r.version == source.version and len(r.running)]
            if targets and len(source.running):
                self.move(source, max(targets, key=lambda r: len(r.running)))
                return

    def move(self, source: "Replica", target: "Replica") -> None:
        num = len(source.running)
        moves = [{"source": source.name, "target": target.name, "num_trajectories": num, "kv_fraction": num / 70}]
        self.emit("manager", "repack", version=source.version, moves=moves, num_released=1, plan_s=0.0004)
        me = {"replica_id": source.name, "incarnation": source.incarnation}
        self.emit(source.name, "released", **me, lease_id=source.lease, num_trajectories=num)
        items, source.running = list(source.running.values()), {}
        self.t += 0.06
        self.adopt(items, source.lease, target)
        source.freed = True
        self.cycle(source)

    def adopt(self, items: list[dict[str, Any]], lease: str, target: "Replica") -> None:
        done = sum(item["tokens"] // 2 for item in items)
        self.emit(
            "data",
            "adopted",
            from_lease=lease,
            to_lease=target.lease,
            version=target.version,
            num_trajectories=len(items),
            num_tokens=done,
        )
        target.num_started += len(items)
        for item in items:
            left = max(4, int((item["ends"] - self.t) / 0.0075))
            self.begin(target, item["id"], item["group"], left, item["attempt"] + 1)
            target.running[item["id"]]["tokens"] = item["tokens"]

    def kill(self, replica: "Replica") -> None:
        replica.alive = False
        me = {"replica_id": replica.name, "incarnation": replica.incarnation}
        lost, lease = list(replica.running.values()), replica.lease
        replica.running = {}
        self.emit("cluster", "process_ended", **me, reason="killed by signal 9")
        self.emit("manager", "replica_suspect", **me, reason="no heartbeat for 3 s")
        self.emit("manager", "replica_lost", **me, reason="killed by signal 9")
        self.at(self.t + 0.6, lambda: self.adopt(lost, lease, self.replicas["replica-2"]))
        self.at(self.t + 5.0, lambda: self.start(replica))

    # ---- trainer

    def publish(self, version: int) -> None:
        self.version = version
        self.emit("relay", "published", version=version, stall_s=round(self.rng.uniform(0.02, 0.05), 4))

    def maybe_train(self) -> None:
        need = GROUPS_PER_STEP * GROUP_SIZE
        if self.training or self.finished or len(self.ready) < need:
            return
        batch, self.ready = self.ready[:need], self.ready[need:]
        self.training = True
        wait_s = max(0.0, self.t - self.asked)
        if wait_s > 1:
            wait = {"wait_id": f"trainer:{self.version}", "waiter": "trainer"}
            self.emit("trainer", "wait_started", **wait, what="3 groups", of=["data"], deadline_s=1800, waited_s=1)
            self.emit("trainer", "wait_ended", **wait, waited_s=wait_s)
        groups = sorted({item["group"] for item in batch})
        self.emit("trainer", "taken", step=self.version + 1, part=0, groups=groups)
        train_s = self.rng.uniform(1.5, 1.9)
        self.at(self.t + train_s, lambda: self.step(batch, wait_s, train_s))

    def step(self, batch: list[dict[str, Any]], wait_s: float, train_s: float) -> None:
        step = self.version + 1
        self.publish(step)
        publish_s = 0.04
        self.t += publish_s
        n = len(batch)
        self.emit(
            "trainer",
            "step",
            step=step,
            wait_s=wait_s,
            train_s=train_s,
            publish_s=publish_s,
            reward_mean=sum(item["reward"] for item in batch) / n,
            response_tokens_mean=sum(item["tokens"] for item in batch) / n,
            staleness_mean=sum(item["staleness"] for item in batch) / n,
            staleness_max=max(item["staleness"] for item in batch),
            tokens=sum(item["tokens"] for item in batch),
            lr=1e-5,
            loss=self.rng.gauss(0, 0.01),
            clip_fraction=abs(self.rng.gauss(0.01, 0.004)),
            grad_norm=self.rng.uniform(0.2, 0.5),
        )
        if step % 10 == 0:
            self.emit("trainer", "checkpoint", step=step, path=f"checkpoints/{step}", seconds=0.3)
        if step % 5 == 0:
            self.evaluations_due.append(step)
        self.training, self.asked = step == self.num_steps, self.t
        if self.training:
            self.at(self.t + 6, self.stop)
        self.maybe_train()

    def stop(self) -> None:
        self.finished = True


class Replica:
    """State of one replica of the toy simulation."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = False
        self.incarnation = 0
        self.cycle = 0
        self.version: int | None = None
        self.freed = False
        self.running: dict[str, dict[str, Any]] = {}
        self.started, self.num_started, self.purpose, self.evaluated = 0.0, 0, "training", 0

    @property
    def lease(self) -> str:
        return f"{self.name}/{self.incarnation}/{self.cycle}"


def synthetic_events(seed: int = 0) -> list[dict[str, Any]]:
    """The events, in order of time."""
    return sorted(Run(seed).play(), key=lambda event: event["t"])


def write_events(folder: Path, events: list[dict[str, Any]]) -> Path:
    """A run folder with these events."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [msgspec.json.encode(event) + b"\n" for event in events]
    (folder / "events.jsonl").write_bytes(b"".join(lines))
    return folder


def test_the_synthetic_run_speaks_the_vocabulary():
    events = synthetic_events()
    assert [event for event in events if problem(event)] == []
    kinds = {event["kind"] for event in events}
    assert kinds <= KINDS.keys()
    assert {"repack", "adopted", "released", "replica_lost", "evaluation", "dropped", "checkpoint"} <= kinds
    assert sum(event["kind"] == "step" for event in events) == NUM_STEPS
    assert 60 < events[-1]["t"] - events[0]["t"] < 120
