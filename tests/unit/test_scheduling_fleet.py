"""The fleet's state machine, one story at a time."""

from collections.abc import Iterable
from time import process_time

from msgspec.structs import replace

from laminar.scheduling.fleet import (
    Adopt,
    Adopted,
    AdoptFailed,
    Beat,
    Command,
    Event,
    Fleet,
    FleetRules,
    GiveUp,
    Kill,
    LeasesSeen,
    Lost,
    Pin,
    Published,
    Released,
    Retire,
    Scaled,
    Start,
    StartOver,
    Tick,
    is_fenced,
    movable_loads,
    new_fleet,
    step,
)
from laminar.schema.fleet import Lease, ReplicaLoad, lease_name

RULES = FleetRules(
    suspect_after_s=3.0,
    dead_after_s=5.0,
    start_timeout_s=100.0,
    max_restarts=3,
    backoff_s=1.0,
    min_replicas=1,
    redirect_wait_s=60.0,
)


class Driver:
    """A manager without a cluster: feeds events, keeps the orders, ticks every second."""

    def __init__(self, num_replicas: int = 0, rules: FleetRules = RULES, survivors: dict[str, int] | None = None):
        self.rules = rules
        self.now_s = 0.0
        self.fleet: Fleet = new_fleet(0.0, survivors)
        if num_replicas:
            self.tell(Scaled(num_replicas=num_replicas))

    def tell(self, event: Event) -> tuple[Command, ...]:
        self.fleet, commands = step(self.fleet, event, self.now_s, self.rules)
        return commands

    def beat(self, number: int, **changes) -> tuple[Command, ...]:
        return self.tell(Beat(load=a_load(number, **{"incarnation": self.incarnation(number), **changes})))

    def incarnation(self, number: int) -> int:
        return self.fleet.replicas[f"replica-{number}"].incarnation

    def status(self, number: int) -> str:
        return self.fleet.replicas[f"replica-{number}"].status

    def wait(self, seconds: float, beating: Iterable[ReplicaLoad] = ()) -> list[Command]:
        """Tick once a second, with heartbeats of `beating` just before."""
        commands: list[Command] = []
        for _ in range(int(seconds)):
            self.now_s += 1.0
            for load in beating:
                commands += self.tell(Beat(load=load))
            commands += self.tell(Tick())
        return commands


def a_load(
    number: int,
    *,
    incarnation: int = 1,
    version: int = 0,
    cycle: int | None = 1,
    kv_used: int = 100,
    phase: str | None = None,
) -> ReplicaLoad:
    busy = cycle is not None
    return ReplicaLoad(
        replica_id=f"replica-{number}",
        incarnation=incarnation,
        phase=phase or ("generating" if busy else "idle"),
        version=version,
        lease_id=lease_name(f"replica-{number}", incarnation, cycle) if busy else None,
        num_running=4 if busy else 0,
        num_waiting=0,
        num_acting=0,
        kv_used_tokens=kv_used if busy else 0,
        kv_capacity_tokens=1_000,
    )


def a_lease(number: int, incarnation: int = 1, cycle: int = 1, version: int = 0, unfinished: int = 4) -> Lease:
    name = lease_name(f"replica-{number}", incarnation, cycle)
    return Lease(lease_id=name, version=version, num_unfinished=unfinished, purpose="training")


def adopts(commands: Iterable[Command]) -> list[tuple[str, str]]:
    return [(c.replica_id, c.lease_id) for c in commands if isinstance(c, Adopt)]


def test_scaling_starts_the_fleet():
    driver = Driver()
    assert driver.tell(Scaled(num_replicas=2)) == (
        Start(replica_id="replica-0", incarnation=1),
        Start(replica_id="replica-1", incarnation=1),
    )


def test_a_silent_replica_is_suspected_then_killed_and_started_again_at_once():
    driver = Driver(2)
    driver.beat(0)
    assert driver.wait(3) == []
    assert driver.status(0) == "suspect"
    commands = driver.wait(2)
    assert commands == [
        Kill(replica_id="replica-0", incarnation=1, reason="no heartbeat for 5.0 s"),
        Start(replica_id="replica-0", incarnation=2),
    ]
    assert is_fenced(driver.fleet, "replica-0", 1)
    assert not is_fenced(driver.fleet, "replica-0", 2)


def test_a_heartbeat_ends_suspicion():
    driver = Driver(1)
    driver.beat(0)
    driver.wait(3)
    driver.beat(0)
    assert driver.status(0) == "healthy"


def test_a_late_heartbeat_of_a_dead_life_changes_nothing():
    driver = Driver(1)
    driver.beat(0)
    driver.tell(Lost(replica_id="replica-0", incarnation=1, reason="connection reset"))
    before = driver.fleet
    assert driver.beat(0, incarnation=1) == ()
    assert driver.fleet == before


def test_news_of_an_earlier_life_s_loss_changes_nothing():
    driver = Driver(1)
    driver.tell(Lost(replica_id="replica-0", incarnation=1, reason="out of memory"))
    assert driver.tell(Lost(replica_id="replica-0", incarnation=1, reason="out of memory")) == ()


def test_a_replica_that_reports_its_start_is_healthy_only_when_its_engine_is_up():
    driver = Driver(1)
    driver.beat(0, phase="starting", cycle=None)
    assert driver.status(0) == "starting"
    driver.beat(0, phase="loading", cycle=None)
    assert driver.status(0) == "healthy"


def test_a_start_that_takes_too_long_has_failed():
    driver = Driver(1)
    assert driver.wait(99) == []
    assert driver.wait(1)[0] == Kill(replica_id="replica-0", incarnation=1, reason="not up after 100 s")


def test_restarts_back_off_and_end_in_retirement_and_the_end_of_the_run():
    driver = Driver(1)
    started_s = []
    for _ in range(3):
        driver.tell(Lost(replica_id="replica-0", incarnation=driver.incarnation(0), reason="no such device"))
        while driver.status(0) == "dead":
            driver.wait(1)
        started_s.append(driver.now_s)
    assert started_s == [0.0, 1.0, 3.0], "at once, then after 1 s, then after 2 s"
    commands = driver.tell(Lost(replica_id="replica-0", incarnation=4, reason="no such device"))
    assert [type(c) for c in commands] == [Kill, Retire, GiveUp]
    assert "no such device" in commands[1].reason
    assert driver.wait(10) == []
    assert is_fenced(driver.fleet, "replica-0", 99)


def test_a_batch_finished_in_between_makes_failures_no_longer_in_a_row():
    driver = Driver(1)
    for _ in range(10):
        driver.beat(0, cycle=1)
        driver.beat(0, cycle=2)
        commands = driver.tell(Lost(replica_id="replica-0", incarnation=driver.incarnation(0), reason="killed"))
        assert isinstance(commands[1], Start)


def test_being_up_alone_does_not_make_failures_forgotten():
    driver = Driver(2)
    for _ in range(4):
        driver.beat(0, cycle=None)
        driver.beat(0, cycle=1)
        driver.tell(Lost(replica_id="replica-0", incarnation=driver.incarnation(0), reason="crash in first batch"))
        while driver.status(0) == "dead":
            driver.wait(1)
    assert driver.status(0) == "retired"


def test_a_batch_held_for_a_minute_makes_failures_forgotten():
    driver = Driver(1)
    driver.tell(Lost(replica_id="replica-0", incarnation=1, reason="killed"))
    driver.wait(62, beating=[a_load(0, incarnation=2)])
    assert driver.fleet.replicas["replica-0"].failures == 0


def test_the_batch_of_a_lost_replica_goes_to_the_least_full_one_of_its_version():
    driver = Driver(4)
    driver.beat(0, version=5)
    driver.beat(1, version=5, kv_used=800)
    driver.beat(2, version=5, kv_used=300)
    driver.beat(3, version=6, kv_used=10)
    commands = driver.tell(Lost(replica_id="replica-0", incarnation=1, reason="gone"))
    assert Adopt(replica_id="replica-2", incarnation=1, lease_id="replica-0/1/1", version=5) in commands
    driver.tell(Adopted(replica_id="replica-2", lease_id="replica-0/1/1"))
    assert driver.fleet.orphans == {}


def test_several_orphans_are_spread_over_the_replicas_of_their_version():
    driver = Driver(5)
    for number in range(5):
        driver.beat(number, kv_used=100 * number)
    asked = []
    for number in (3, 4):
        asked += adopts(driver.tell(Lost(replica_id=f"replica-{number}", incarnation=1, reason="gone")))
    assert [replica for replica, _ in asked] == ["replica-0", "replica-1"]


def test_suspects_and_replicas_of_other_versions_adopt_nothing():
    driver = Driver(3)
    driver.beat(1)
    driver.wait(2, beating=[a_load(0)])
    driver.wait(1, beating=[a_load(0), a_load(2, version=7)])
    assert driver.status(1) == "suspect"
    assert adopts(driver.tell(Lost(replica_id="replica-0", incarnation=1, reason="gone"))) == []


def test_without_one_of_its_version_an_orphan_goes_to_the_first_replica_between_batches():
    driver = Driver(2)
    driver.beat(0, version=5)
    driver.beat(1, version=6)
    assert adopts(driver.tell(Lost(replica_id="replica-0", incarnation=1, reason="gone"))) == []
    assert adopts(driver.beat(1, version=6)) == []
    assert driver.beat(0, cycle=None, phase="loading") == (
        Adopt(replica_id="replica-0", incarnation=2, lease_id="replica-0/1/1", version=5),
    )
    assert adopts(driver.beat(1, version=6, cycle=None)) == [], "somebody was asked already"


def test_an_orphan_that_nobody_can_adopt_starts_over():
    driver = Driver(2)
    driver.beat(0, version=5)
    driver.tell(Lost(replica_id="replica-0", incarnation=1, reason="gone"))
    commands = driver.wait(60, beating=[a_load(1, version=6)])
    assert StartOver(lease_id="replica-0/1/1") in commands
    assert driver.fleet.orphans == {}


def test_who_cannot_adopt_is_not_asked_again_at_once_and_somebody_else_is():
    driver = Driver(3)
    for number in range(3):
        driver.beat(number, kv_used=100 * number)
    driver.tell(Lost(replica_id="replica-0", incarnation=1, reason="gone"))
    failed = AdoptFailed(replica_id="replica-1", lease_id="replica-0/1/1")
    assert adopts(driver.tell(failed)) == [("replica-2", "replica-0/1/1")]
    assert adopts(driver.tell(AdoptFailed(replica_id="replica-2", lease_id="replica-0/1/1"))) == []
    again = driver.wait(2, beating=[a_load(1), a_load(2)])
    assert adopts(again) == [("replica-1", "replica-0/1/1")]


def test_an_orphan_whose_weights_are_gone_starts_over_at_once_unless_somebody_runs_under_them():
    for version_of_the_third, starts_over in ((7, True), (5, False)):
        driver = Driver(3)
        driver.beat(0, version=5)
        driver.beat(1, version=6, cycle=None, phase="idle")
        driver.beat(2, version=version_of_the_third, phase="loading")
        driver.tell(Lost(replica_id="replica-0", incarnation=1, reason="gone"))
        failed = AdoptFailed(replica_id="replica-1", lease_id="replica-0/1/1", lacks_weights=True)
        assert (StartOver(lease_id="replica-0/1/1") in driver.tell(failed)) == starts_over
        assert (driver.fleet.orphans == {}) == starts_over


def test_an_adopter_that_does_not_answer_is_given_up_on():
    driver = Driver(3)
    for number in range(3):
        driver.beat(number, kv_used=100 * number)
    driver.tell(Lost(replica_id="replica-0", incarnation=1, reason="gone"))
    commands = driver.wait(30, beating=[a_load(1), a_load(2)])
    assert adopts(commands) == [("replica-2", "replica-0/1/1")]


def test_an_adopter_that_dies_is_replaced():
    driver = Driver(3)
    for number in range(3):
        driver.beat(number, kv_used=100 * number)
    driver.tell(Lost(replica_id="replica-0", incarnation=1, reason="gone"))
    commands = driver.tell(Lost(replica_id="replica-1", incarnation=1, reason="gone"))
    assert adopts(commands) == [("replica-2", "replica-0/1/1"), ("replica-2", "replica-1/1/1")]


def test_what_a_repack_released_goes_to_the_planned_destination():
    driver = Driver(3)
    for number in range(3):
        driver.beat(number, kv_used=100 * (3 - number))
    released = Released(lease_id="replica-2/1/1", version=0, destination="replica-0")
    assert adopts(driver.tell(released)) == [("replica-0", "replica-2/1/1")]
    assert driver.fleet.replicas["replica-2"].load.lease_id is None
    assert {load.replica_id for load in movable_loads(driver.fleet)} == {"replica-1", "replica-2"}


def test_if_the_planned_destination_died_a_released_batch_goes_elsewhere_but_not_back():
    driver = Driver(3)
    for number in range(3):
        driver.beat(number, kv_used=100 * (3 - number))
    driver.tell(Lost(replica_id="replica-0", incarnation=1, reason="gone"))
    driver.beat(2, kv_used=1)
    commands = driver.tell(Released(lease_id="replica-2/1/1", version=0, destination="replica-0"))
    assert ("replica-1", "replica-2/1/1") in adopts(commands)
    driver.beat(2, kv_used=1)
    assert driver.fleet.orphans["replica-2/1/1"].adopter == "replica-1", "a late heartbeat changes nothing"


def test_a_released_batch_does_not_go_back_to_its_source_by_a_late_heartbeat():
    driver = Driver(1)
    driver.beat(0)
    driver.tell(AdoptFailed(replica_id="replica-0", lease_id="replica-0/1/1"))
    driver.tell(Released(lease_id="replica-0/1/1", version=0, destination="replica-9"))
    driver.tell(AdoptFailed(replica_id="replica-0", lease_id="replica-0/1/1"))
    assert adopts(driver.wait(5, beating=[a_load(0)])) == []


def test_a_replica_between_batches_is_asked_to_adopt_one_orphan_at_a_time():
    driver = Driver(3)
    driver.beat(0, version=5)
    driver.beat(1, version=6)
    driver.tell(Lost(replica_id="replica-0", incarnation=1, reason="gone"))
    driver.tell(Lost(replica_id="replica-1", incarnation=1, reason="gone"))
    assert adopts(driver.beat(2, version=7, cycle=None)) == [("replica-2", "replica-0/1/1")]
    assert adopts(driver.wait(2, beating=[a_load(2, version=7, cycle=None)])) == []
    assert adopts(driver.tell(Adopted(replica_id="replica-2", lease_id="replica-0/1/1"))) == []


def test_an_adopter_that_begins_a_batch_of_another_version_has_missed_the_order():
    driver = Driver(3)
    for number in range(3):
        driver.beat(number, kv_used=100 * number)
    driver.tell(Lost(replica_id="replica-0", incarnation=1, reason="gone"))
    assert adopts(driver.beat(1, version=1, cycle=2)) == [("replica-2", "replica-0/1/1")]


def test_an_adoption_whose_answer_was_lost_is_seen_in_the_list():
    driver = Driver(2)
    driver.beat(0)
    driver.tell(Lost(replica_id="replica-0", incarnation=1, reason="gone"))
    assert adopts(driver.beat(1, version=7, cycle=None)) == [("replica-1", "replica-0/1/1")]
    driver.tell(LeasesSeen(leases=()))
    assert "replica-0/1/1" in driver.fleet.orphans, "the adopter does not run it yet"
    driver.beat(1, version=0, cycle=5)
    driver.tell(LeasesSeen(leases=(a_lease(1, cycle=5),)))
    assert driver.fleet.orphans == {}


def test_versions_of_batches_and_orphans_are_pinned_and_only_changes_are_told():
    driver = Driver(2)
    assert driver.beat(0, version=5) == (Pin(versions=(5,)),)
    assert driver.beat(0, version=5) == ()
    assert driver.beat(1, version=6) == (Pin(versions=(5, 6)),)
    assert Pin not in [type(c) for c in driver.tell(Lost(replica_id="replica-0", incarnation=1, reason="gone"))]
    assert driver.wait(60, beating=[a_load(1, version=6)])[-1] == Pin(versions=(6,))
    assert driver.tell(LeasesSeen(leases=(a_lease(1, version=6), a_lease(7, version=2)))) == (Pin(versions=(2, 6)),)


def test_a_lease_of_a_dead_life_is_found_in_the_data_shard_s_list():
    driver = Driver(2)
    driver.beat(0, cycle=1)
    driver.beat(1, cycle=1)
    driver.tell(Lost(replica_id="replica-0", incarnation=1, reason="gone just after it claimed a batch"))
    driver.tell(Adopted(replica_id="replica-1", lease_id="replica-0/1/1"))
    commands = driver.tell(LeasesSeen(leases=(a_lease(0, cycle=2), a_lease(1))))
    assert adopts(commands) == [("replica-1", "replica-0/1/2")]


def test_an_orphan_that_has_nothing_unfinished_is_forgotten():
    driver = Driver(1)
    driver.beat(0)
    driver.tell(Lost(replica_id="replica-0", incarnation=1, reason="gone"))
    driver.tell(LeasesSeen(leases=(a_lease(0, unfinished=0),)))
    assert driver.fleet.orphans == {}


def test_a_list_that_is_ahead_of_heartbeats_orphans_nothing():
    driver = Driver(2)
    for second in range(4):
        driver.wait(1, beating=[a_load(0, cycle=None), a_load(1)])
        assert driver.tell(LeasesSeen(leases=(a_lease(0, cycle=9), a_lease(1)))) == (), second
    driver.beat(0, cycle=9)
    driver.wait(10, beating=[a_load(0, cycle=9), a_load(1)])
    assert driver.tell(LeasesSeen(leases=(a_lease(0, cycle=9), a_lease(1)))) == ()


def test_a_lease_that_its_live_owner_denies_becomes_an_orphan():
    driver = Driver(2)
    asked = []
    for _ in range(8):
        asked += adopts(driver.wait(1, beating=[a_load(0, cycle=2), a_load(1)]))
        asked += adopts(driver.tell(LeasesSeen(leases=(a_lease(0, cycle=1), a_lease(0, cycle=2), a_lease(1)))))
    assert [lease for _, lease in asked] == ["replica-0/1/1"]


def test_a_restarted_manager_waits_for_the_heartbeats_of_survivors():
    driver = Driver(survivors={"replica-0": 3, "replica-1": 1})
    leases = LeasesSeen(leases=(a_lease(0, incarnation=3), a_lease(1), a_lease(2)))
    assert adopts(driver.tell(leases)) == []
    commands = driver.wait(5, beating=[a_load(0, incarnation=3)])
    assert [c for c in commands if isinstance(c, Kill | Start)] == [
        Kill(replica_id="replica-1", incarnation=1, reason="no heartbeat for 5.0 s"),
        Start(replica_id="replica-1", incarnation=2),
    ]
    asked = adopts(driver.tell(leases))
    assert asked == [("replica-0", "replica-1/1/1"), ("replica-0", "replica-2/1/1")]


def test_a_restarted_manager_takes_unknown_replicas_in_for_a_while_and_keeps_their_numbers():
    driver = Driver(1)
    assert not is_fenced(driver.fleet, "replica-0", 4)
    commands = driver.beat(0, incarnation=4, version=2)
    assert commands[0] == Kill(replica_id="replica-0", incarnation=1, reason="a later life reported")
    driver.tell(Beat(load=a_load(8, incarnation=2)))
    assert driver.status(8) == "healthy"
    driver.wait(6, beating=[a_load(0, incarnation=4), a_load(8, incarnation=2)])
    assert is_fenced(driver.fleet, "replica-9", 1)
    assert driver.tell(Beat(load=a_load(9))) == ()
    assert "replica-9" not in driver.fleet.replicas


def test_a_manager_that_slept_suspects_nobody_for_it():
    driver = Driver(1)
    driver.beat(0)
    driver.now_s += 600.0
    assert driver.tell(Tick()) == ()
    assert driver.status(0) == "healthy"
    assert [type(c) for c in driver.wait(5)] == [Kill, Start]


def test_scaling_down_removes_those_that_do_least_and_their_batches_go_on():
    driver = Driver(4)
    driver.beat(0)
    driver.beat(1)
    driver.beat(2, cycle=None)
    commands = driver.tell(Scaled(num_replicas=1))
    assert [c.replica_id for c in commands if isinstance(c, Retire)][:2] == ["replica-3", "replica-2"]
    assert len([c for c in commands if isinstance(c, Retire)]) == 3
    assert adopts(commands) == [("replica-1", "replica-0/1/1")]
    assert GiveUp not in [type(c) for c in commands]


def test_the_run_is_given_up_once_however_many_more_are_lost():
    driver = Driver(3, rules=replace(RULES, min_replicas=2, max_restarts=0))
    commands = []
    for number in range(3):
        commands += driver.tell(Lost(replica_id=f"replica-{number}", incarnation=1, reason="gone"))
    assert [type(c) for c in commands if not isinstance(c, Kill)] == [Retire, Retire, GiveUp, Retire]


def test_scaling_up_uses_new_names_and_replaces_retired_replicas():
    driver = Driver(2, rules=replace(RULES, max_restarts=0))
    driver.beat(1)
    driver.tell(Lost(replica_id="replica-0", incarnation=1, reason="gone"))
    assert driver.status(0) == "retired"
    assert driver.tell(Scaled(num_replicas=3)) == (
        Start(replica_id="replica-2", incarnation=1),
        Start(replica_id="replica-3", incarnation=1),
    )


def test_a_fleet_is_never_scaled_below_its_minimum():
    driver = Driver(3, rules=replace(RULES, min_replicas=2))
    commands = driver.tell(Scaled(num_replicas=0))
    assert len([c for c in commands if isinstance(c, Retire)]) == 1


def test_the_newest_published_version_is_remembered():
    driver = Driver(1)
    driver.tell(Published(version=3))
    driver.tell(Published(version=2))
    assert driver.fleet.newest_version == 3


def test_a_heartbeat_in_a_fleet_of_a_thousand_is_cheap():
    driver = Driver(1_000)
    for number in range(1_000):
        driver.beat(number)
    began_s = process_time()
    for number in range(1_000):
        driver.tell(Beat(load=a_load(number, kv_used=200)))
    assert process_time() - began_s < 0.5, "far above the 0.02 s measured, for slow and shared machines"
