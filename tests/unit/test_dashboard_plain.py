from test_dashboard_synthetic import NUM_STEPS, synthetic_events

from laminar.dashboard.plain import PlainLines
from laminar.dashboard.state import RunView, fold
from laminar.dashboard.status import SILENT_AFTER_S, chain_lines, status_text
from laminar.dashboard.text import bar, count, elapsed, fixed, percent, plural, sparkline
from laminar.telemetry.vocabulary import Fact, Repack, ReplicaLost, RunFinished, RunStarted, WaitStarted, to_facts


def _lines(facts: list[Fact]) -> list[str]:
    view, plain = RunView(), PlainLines()
    lines: list[str] = []
    for fact in facts:
        fold(view, [fact])
        lines += plain.lines(view, fact)
    return lines


def _started() -> RunStarted:
    return RunStarted(t=0, source="launcher", run_id="r", name="demo", num_replicas=3, num_steps=40)


def _wait(waiter: str, what: str, of: list[str], since: float, deadline_s: float | None = None) -> WaitStarted:
    fields = {"wait_id": f"{waiter}:1", "waiter": waiter, "what": what, "of": of, "deadline_s": deadline_s}
    return WaitStarted(t=since + 1, source=waiter, waited_s=1.0, **fields)


def test_a_run_is_told_in_a_line_per_step_and_what_matters_besides():
    lines = _lines(list(to_facts(synthetic_events())))
    assert sum("] step " in line for line in lines) == NUM_STEPS
    assert len(lines) < 2.2 * NUM_STEPS
    assert lines[0] == "[00:00] run synthetic started: 40 steps, 3 replicas"
    assert lines[-1].endswith("] run finished")
    texts = [line.split("] ", 1)[1] for line in lines]
    assert "replica-1 lost: killed by signal 9" in texts
    assert "replica-1 is back (life 2)" in texts
    assert any(text.startswith("held-out accuracy 0.") and "from 0.100 at version 0" in text for text in texts)
    assert "checkpoint of step 20 written in 0.3 s: checkpoints/20" in texts


def test_repacks_are_summed_up_and_none_is_lost():
    def repack(t: float) -> Repack:
        return next(
            to_facts(
                [
                    {
                        "t": t,
                        "source": "manager",
                        "kind": "repack",
                        "version": 1,
                        "moves": [{"source": "a", "target": "b", "num_trajectories": 3}],
                    }
                ]
            )
        )

    repacks = [repack(20 + t / 10) for t in range(300)]
    lines = _lines([_started(), *repacks, RunFinished(t=60, source="launcher", reason="finished")])
    told = [line for line in lines if "repack" in line]
    assert len(told) == 4
    assert sum(int(line.split()[1]) for line in told) == 300
    assert sum(int(line.split(": ")[1].split()[0]) for line in told) == 900


def test_a_run_that_ends_early_says_so_once():
    lines = _lines([_started(), RunFinished(t=61, source="launcher", reason="stopped by SIGINT")])
    assert lines[1:] == ["[01:01] the run ended early: stopped by SIGINT"]


def test_a_long_wait_is_told_once():
    view, plain = fold(RunView(), [_started(), _wait("trainer", "3 groups", ["data"], 10)]), PlainLines()
    assert plain.waiting(view, 30) == []
    assert plain.waiting(view, 45) == ["[00:45] trainer has waited 35 s for 3 groups"]
    assert plain.waiting(view, 46) == []


def test_a_flood_of_failures_is_told_completely():
    lost = [ReplicaLost(t=i, source="m", replica_id=f"replica-{i}", incarnation=1, reason="x") for i in range(200)]
    assert sum(" lost: x" in line for line in _lines([_started(), *lost])) == 200


def test_status_of_a_finished_run_says_what_came_out():
    view = fold(RunView(), to_facts(synthetic_events()))
    text = status_text(view, view.now + 1_000)
    assert text.startswith("synthetic: finished, step 40 of 40, after 01:3")
    assert "replicas" not in text
    assert "replica-1 lost: killed by signal 9" in text


def test_status_of_a_live_run_names_replicas_and_whether_they_speak():
    facts = list(to_facts(synthetic_events()))[:2_000]
    view = fold(RunView(), facts)
    text = status_text(view, view.now + 2)
    assert text.startswith("synthetic: running, step ")
    assert "replica-2: generating, version " in text
    assert "nobody has waited for more than a second" in text
    assert "silent for 00:31, perhaps dead" in status_text(view, view.now + SILENT_AFTER_S + 1)


def test_status_says_where_each_replica_is_if_there_are_several_machines():
    def event(kind: str, **fields: object) -> dict[str, object]:
        return {"t": 1.0, "source": "launcher", "kind": kind, **fields}

    one = [
        event("machine_joined", machine="gpu-1", host="gpu-1"),
        event("replica_started", replica_id="replica-0", incarnation=1, machine="gpu-1", host="gpu-1"),
    ]
    assert "on gpu-1" not in status_text(fold(RunView(), to_facts(one)), 2.0)
    two = [*one, event("machine_joined", machine="gpu-2", host="gpu-2")]
    view = fold(RunView(), to_facts(two))
    assert "replica-0: starting" in status_text(view, 2.0)
    assert ", on gpu-1" in status_text(view, 2.0)
    fold(view, to_facts([event("machine_lost", machine="gpu-1", reason="its power failed")]))
    fold(view, to_facts([event("process_ended", replica_id="replica-0", incarnation=1)]))
    assert "replica-0: lost" in status_text(view, 2.0)
    assert "machine gpu-1 lost: its power failed" in status_text(view, 2.0)


def test_the_chain_of_waits_ends_with_the_one_that_works():
    facts = list(to_facts(synthetic_events()))[:2_000]
    view = fold(RunView(), facts)
    now = view.now
    fold(view, [_wait("trainer", "3 groups", ["data"], now - 9, 60), _wait("data", "room", ["replica-2"], now - 5)])
    lines = chain_lines(view, now)
    assert lines[0] == "trainer has waited 9.0 s for 3 groups from data, 51 s to its deadline"
    assert lines[1] == "  data has waited 5.0 s for room from replica-2"
    assert lines[2].startswith("    replica-2: generating, version ")
    assert len(lines) == 3


def test_a_circle_of_waits_is_called_a_deadlock():
    waits = [_wait("trainer", "groups", ["data"], 1), _wait("data", "weights", ["trainer"], 2)]
    assert chain_lines(fold(RunView(), waits), 9)[-1].strip() == "which waits for trainer: a deadlock"


def test_numbers_are_written_as_people_read_them():
    assert [elapsed(s) for s in (-1, 59.9, 83, 7_283)] == ["00:00", "00:59", "01:23", "2:01:23"]
    assert [count(n) for n in (0, 7, 7.25, 99.6, 831, 999.6, 3_412, 34_120, 1_200_000, 2e9)] == [
        "0", "7", "7.2", "100", "831", "1.0k", "3.4k", "34k", "1.2M", "2.0G",
    ]  # fmt: skip
    assert [percent(x) for x in (0, 0.001, 0.42, 1)] == ["0%", "<1%", "42%", "100%"]
    assert [plural(n, w) for n, w in ((1, "repack"), (2, "trajectory"), (0, "pull"))] == [
        "1 repack", "2 trajectories", "0 pulls",
    ]  # fmt: skip
    assert fixed(None) == "–"
    assert [bar(x, 4) for x in (0, 0.5, 0.53, 1, 7)] == ["    ", "██  ", "██▏ ", "████", "████"]


def test_sparklines_scale_average_and_keep_to_their_width():
    assert sparkline([], 5) == ""
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 1, 1], 8) == "▁▁▁"
    assert len(sparkline(list(range(1_000)), 30)) == 30
    assert sparkline([0.5], 8, low=0, high=1) in "▄▅"
