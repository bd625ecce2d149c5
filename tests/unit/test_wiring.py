"""Configuration keys reach the part that they are for."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from laminar.cluster.launcher import check_gpus, check_room
from laminar.cluster.machine import this_machine
from laminar.cluster.machines import Machines
from laminar.cluster.wiring import (
    data_rules,
    learner_need,
    manager_rules,
    replica_need,
    replica_rules,
    useful_batch,
)
from laminar.config.loading import parse_config
from laminar.config.run_config import RepackConfig, RunConfig
from laminar.scheduling.placement import Need
from laminar.scheduling.roofline import HARDWARE
from laminar.schema.errors import UserError
from laminar.telemetry.events import NullEvents


def machines(*num_gpus: float) -> Machines:
    known = Machines(NullEvents(), room_wait_s=0.0)
    for number, gpus in enumerate(num_gpus):
        known.add(replace(this_machine(Path(), gpus), name=f"m{number}" if number else ""))
    return known


def config(**sections: Any) -> RunConfig:
    return parse_config({"model": {"path": "m"}, "task": {"path": "a:B"}, **sections}, source="test")


def test_every_accelerator_of_the_roofline_table_can_be_named() -> None:
    (names, _) = get_args(RepackConfig.model_fields["hardware"].annotation)
    assert set(get_args(names)) == set(HARDWARE)


@pytest.mark.parametrize(
    ("repack", "engine", "expected"),
    [
        ({"max_running": 37}, {}, 37),
        ({}, {"max_running": 99}, 99),
        ({"hardware": "H800"}, {"max_running": 1024, "dtype": "bfloat16"}, 295),
        ({"hardware": "H800"}, {"max_running": 1024, "dtype": "float32"}, 590),
        ({"hardware": "H800"}, {"max_running": 64, "dtype": "bfloat16"}, 64),
    ],
)
def test_the_bound_on_moved_work_comes_from_config_roofline_or_engine(
    repack: dict[str, Any], engine: dict[str, Any], expected: int
) -> None:
    run = config(manager={"repack": repack}, rollout={"engine": {"kind": "torch", **engine}})
    assert useful_batch(run) == expected
    rules = manager_rules(run).repack
    assert rules is not None
    assert rules.max_running == expected


def test_repack_can_be_switched_off() -> None:
    assert manager_rules(config(manager={"repack": {"enabled": False}})).repack is None


def test_a_run_draws_what_its_steps_train_and_not_more() -> None:
    rules = data_rules(config(trainer={"num_steps": 7, "groups_per_step": 3}))
    assert rules.total_groups == 21
    assert rules.max_groups_ahead == 12


def test_a_deterministic_run_leaves_nothing_to_chance() -> None:
    run = config(deterministic=True, trainer={"groups_per_step": 3})
    rules = data_rules(run)
    assert (rules.sampler, rules.deterministic, rules.groups_per_step) == ("prompt_order", True, 3)
    assert rules.schedule.max_lag == 0
    assert manager_rules(run).repack is None
    assert not data_rules(config()).deterministic


@pytest.mark.parametrize(
    "section", [{"data": {"sampler": "freshest"}}, {"rollout": {"engine": {"kind": "custom", "path": "a:B"}}}]
)
def test_what_a_deterministic_run_cannot_keep_is_refused(section: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="deterministic: true"):
        config(deterministic=True, **section)


def test_training_and_evaluation_answers_may_be_drawn_differently() -> None:
    run = config(evaluation={"sampling": {"temperature": 0}}, rollout={"sampling": {"top_p": 0.9}})
    sampling = replica_rules(run, "replica-0", 1, (2,)).sampling
    assert sampling["evaluation"].temperature == 0
    assert (sampling["training"].temperature, sampling["training"].top_p) == (1.0, 0.9)


def test_processes_on_cuda_are_given_gpus_and_may_share_one() -> None:
    on_gpu = {"kind": "torch", "device": "cuda"}
    run = config(
        rollout={"engine": on_gpu, "gpus_per_replica": 0.25, "num_replicas": 2},
        trainer={"device": "cuda", "gpus": 0.5},
    )
    assert (learner_need(run).num_gpus, replica_need(run).num_gpus) == (0.5, 0.25)
    check_gpus(run, 2, machines(1.0))
    with pytest.raises(UserError, match=r"need 1 GPUs but this machine has 0"):
        check_gpus(run, 2, machines(0.0))


@pytest.mark.parametrize("address", ["here", "host:", ":6379x", "autos"])
def test_an_address_of_a_cluster_is_auto_or_host_and_port(address: str) -> None:
    assert config(cluster={"address": "gpu-1:6379"}).cluster.address == "gpu-1:6379"
    with pytest.raises(UserError, match=r"cluster\.address.*auto, HOST:PORT"):
        config(cluster={"address": address})


def test_gpus_that_lie_on_different_machines_are_not_room_for_one_replica() -> None:
    need = Need(num_gpus=2, is_replica=True)
    check_room("a replica", need, 2, machines(2.0, 3.0))
    with pytest.raises(UserError, match=r"a replica needs 2 GPUs of one machine; 2 .* asked for, .* room for 1"):
        check_room("a replica", need, 2, machines(2.0, 1.0, 1.0))


def test_a_run_on_the_cpu_needs_no_gpu() -> None:
    check_gpus(config(), 2, machines(0.0))
