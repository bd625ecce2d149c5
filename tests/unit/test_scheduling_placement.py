"""Where replicas and services go, whatever comes, fails and dies."""

from hypothesis import given
from hypothesis import strategies as st

from laminar.scheduling.placement import (
    Need,
    Placement,
    best_machine,
    ended,
    machine_joined,
    machine_left,
    num_that_fit,
    placed,
)

REPLICA, GPU_REPLICA, TRAINER = Need(is_replica=True), Need(num_gpus=1, is_replica=True), Need(num_gpus=1)


def machines(**gpus: float) -> Placement:
    placement = Placement()
    for name, num_gpus in gpus.items():
        placement = machine_joined(placement, name, num_gpus)
    return placement


def put(placement: Placement, name: str, need: Need, near: str | None = None) -> Placement:
    machine = best_machine(placement, name, need, near)
    assert machine is not None
    return placed(placement, name, need, machine)


def where(placement: Placement, name: str) -> str:
    return placement.tenants[name][0]


@given(num_machines=st.integers(1, 9), num_replicas=st.integers(0, 40))
def test_replicas_are_spread_evenly(num_machines: int, num_replicas: int) -> None:
    placement = machines(**{f"m{n}": 0 for n in range(num_machines)})
    for number in range(num_replicas):
        placement = put(placement, f"replica-{number}", REPLICA)
    counts = [placement.num_replicas_on(machine) for machine in placement.gpus]
    assert max(counts) - min(counts) <= 1


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0.0, 0.3, 0.5, 1.0, 2.0]), st.booleans()), max_size=40))
def test_no_machine_ever_gets_more_than_its_gpus_hold(story: list[tuple[int, float, bool]]) -> None:
    placement = machines(a=1, b=2, c=0)
    for number, num_gpus, fails in story:
        name, need = f"replica-{number}", Need(num_gpus=num_gpus, is_replica=True)
        if fails or name in placement.tenants:
            placement = ended(placement, name, lived_s=1.0)
        elif machine := best_machine(placement, name, need):
            placement = placed(placement, name, need, machine)
        assert all(placement.room_on(machine) > -1e-6 for machine in placement.gpus), placement


def test_the_first_failure_is_followed_by_a_start_in_place_and_the_second_by_one_elsewhere() -> None:
    placement = put(put(machines(a=0, b=0), "replica-0", REPLICA, near="b"), "replica-1", REPLICA)
    assert (where(placement, "replica-0"), where(placement, "replica-1")) == ("b", "a")
    placement = put(ended(placement, "replica-0", lived_s=1.0), "replica-0", REPLICA)
    assert where(placement, "replica-0") == "b"
    placement = put(ended(placement, "replica-0", lived_s=1.0), "replica-0", REPLICA)
    assert where(placement, "replica-0") == "a", "though more stands there"
    assert placement.given_up == {"b"}


def test_failures_long_apart_are_each_the_first() -> None:
    placement = put(machines(a=0, b=0), "replica-0", REPLICA, near="b")
    for _ in range(5):
        placement = put(ended(placement, "replica-0", lived_s=1000.0), "replica-0", REPLICA)
        assert where(placement, "replica-0") == "b"
    assert not placement.given_up


def test_a_machine_that_was_given_up_is_better_than_none() -> None:
    placement = put(machines(a=1), "replica-0", GPU_REPLICA)
    for _ in range(4):
        placement = put(ended(placement, "replica-0", lived_s=1.0), "replica-0", GPU_REPLICA)
    placement = machine_joined(placement, "b", 1)
    assert best_machine(placement, "replica-1", GPU_REPLICA) == "b"
    placement = ended(placement, "replica-0", lived_s=1.0)
    assert best_machine(placement, "replica-0", GPU_REPLICA) == "b"


def test_services_stand_together_and_keep_their_room_while_they_are_started_again() -> None:
    placement = machines(a=2, b=2)
    for name, need in (("data", Need()), ("manager", Need()), ("trainer", TRAINER)):
        placement = put(placement, name, need, near="b")
        assert where(placement, name) == "b"
    for _ in range(3):
        placement = ended(placement, "data", lived_s=1.0)
    placement = ended(placement, "trainer", lived_s=1.0)
    assert placement.room_on("b") == 1
    assert {best_machine(placement, name, Need()) for name in ("data", "manager")} == {"b"}
    assert num_that_fit(placement, GPU_REPLICA) == 3


@given(st.integers(0, 30))
def test_a_new_machine_gets_the_next_replicas_and_a_lost_one_none(num_replicas: int) -> None:
    placement = machines(a=0, b=0)
    for number in range(2 * num_replicas):
        placement = put(placement, f"replica-{number}", REPLICA)
    placement = machine_joined(placement, "c", 0)
    for number in range(num_replicas):
        placement = put(placement, f"late-{number}", REPLICA)
    assert placement.num_replicas_on("c") == num_replicas
    placement = machine_left(placement, "a")
    assert "a" not in {machine for machine, _ in placement.tenants.values()}
    assert best_machine(placement, "replica-0", REPLICA) in {"b", "c"}
    assert best_machine(machine_left(machine_left(placement, "b"), "c"), "replica-0", REPLICA) is None


def test_what_fits_in_all_may_not_fit_anywhere() -> None:
    assert num_that_fit(machines(a=1, b=1, c=0), Need(num_gpus=2, is_replica=True)) == 0
    assert num_that_fit(machines(a=1, b=0.5), Need(num_gpus=0.3, is_replica=True)) == 4
    assert num_that_fit(Placement(), REPLICA) == 0
    assert num_that_fit(machines(a=0), REPLICA) == float("inf")
