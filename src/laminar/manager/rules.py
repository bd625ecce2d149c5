"""From the `manager` section of a configuration to the manager's rules; the same for real and simulated runs."""

from laminar.config.run_config import ManagerConfig
from laminar.manager.manager import ManagerRules
from laminar.scheduling.fleet import FleetRules
from laminar.scheduling.repack import RepackRules


def rules_of(
    manager: ManagerConfig, *, max_running: int, repacks: bool, replace_machine_s: float = 0.0
) -> ManagerRules:
    """`max_running` is B of repack, `repacks` whether the schedule allows any, `replace_machine_s` what a start may
    take besides `start_timeout_s`."""
    return ManagerRules(
        fleet=FleetRules(
            suspect_after_s=manager.suspect_after_s,
            dead_after_s=manager.dead_after_s,
            start_timeout_s=manager.start_timeout_s + replace_machine_s,
            max_restarts=manager.max_restarts,
            backoff_s=manager.backoff_s,
            min_replicas=manager.min_replicas,
            redirect_wait_s=manager.redirect_wait_s,
        ),
        repack=RepackRules(
            max_kv_fill=manager.repack.max_kv_fill,
            max_running=max_running,
            strict_idleness=manager.repack.strict_idleness,
        )
        if manager.repack.enabled and repacks
        else None,
        repack_every_s=manager.repack.every_s,
        repack_dry_run=manager.repack.dry_run,
        tick_s=manager.heartbeat_s / 2,
        leases_every_s=manager.suspect_after_s,
    )
