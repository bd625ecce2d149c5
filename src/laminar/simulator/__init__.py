"""The shipped services on a virtual clock: emulated engine, learner and links, workloads, faults, reports.

Invariant: nothing here decides anything; all decisions are those of `scheduling`, asked by the services that a real run
consists of.
"""
