"""The vocabulary is the single source: what the code emits is compared with it, call by call."""

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from laminar.telemetry.vocabulary import KINDS, Fact, Resumed, RunStarted, Step, problem, to_facts, undone_by

SOURCES = Path(__file__).parents[2] / "src" / "laminar"


def _emits() -> Iterator[tuple[str, ast.Call, str]]:
    """Every call of `emit` or `_emit` in the package whose kind is written out: where, the call, the kind."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("emit", "_emit")
            ):
                for kind in ast.walk(node.args[0]) if node.args else ():
                    if isinstance(kind, ast.Constant) and isinstance(kind.value, str):
                        yield f"{path.relative_to(SOURCES)}:{node.lineno}", node, kind.value


def _required(kind: type[Fact]) -> set[str]:
    fields = msgspec.structs.fields(kind)
    return {field.name for field in fields if field.required} - {"t", "source"}


def test_every_event_that_the_code_emits_is_in_the_vocabulary():
    emitted = {kind for _, _, kind in _emits()}
    assert {"step", "load", "claimed", "trajectory", "repack"} <= emitted
    assert emitted <= KINDS.keys()


def test_every_event_is_emitted_with_the_fields_that_its_readers_need():
    for where, call, kind in _emits():
        given = {keyword.arg for keyword in call.keywords}
        if None in given:
            continue  # fields from a mapping: the contract tests of that part see them
        if isinstance(call.func, ast.Attribute) and call.func.attr == "_emit":
            given |= {"replica_id", "incarnation"}
        assert _required(KINDS[kind]) <= given, f"{where}: {kind} lacks {_required(KINDS[kind]) - given}"


def test_every_kind_says_what_it_means():
    for name, kind in KINDS.items():
        assert kind.__doc__, name


def test_fields_of_others_are_allowed_and_integers_are_numbers():
    event = {"t": 1, "source": "trainer", "kind": "step", "step": 3, "wait_s": 0, "train_s": 1, "publish_s": 0}
    event |= {"staleness_max": 2.0, "tokens": 12.0, "loss": None, "task/format": 0.5}
    assert problem(event) is None
    (fact,) = to_facts([event])
    assert isinstance(fact, Step)
    assert (fact.step, fact.staleness_max, fact.loss) == (3, 2, None)


@pytest.mark.parametrize(
    "event", [{}, {"kind": 3}, {"kind": []}, {"kind": "step"}, {"t": "now", "kind": "resumed", "step": 1}]
)
def test_what_is_no_event_is_left_out_with_a_reason(event: dict):
    assert list(to_facts([event])) == []
    assert problem(event)


def test_a_new_start_undoes_what_comes_after_its_step():
    assert undone_by(Resumed(t=0, source="l", step=4)) == 4
    assert undone_by(RunStarted(t=0, source="l", run_id="r", name="n", num_replicas=1, num_steps=1)) == -1
