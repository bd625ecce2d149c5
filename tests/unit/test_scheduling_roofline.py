"""The batch beyond which decoding together slows everybody down."""

import pytest

from laminar.scheduling.roofline import HARDWARE, max_measured_batch, max_useful_batch

FIG_4_7B_TP1_MS = {1: 6.98, 4: 7.30, 8: 7.67, 16: 8.41, 32: 9.58, 64: 12.6, 128: 18.1, 256: 29.6}


def test_b_of_the_paper_s_accelerator_is_295():
    h800 = HARDWARE["H800"]
    assert max_useful_batch(h800.flops_per_s, h800.bandwidth_bytes_per_s) == 295


def test_half_the_bytes_per_weight_halve_b():
    assert max_useful_batch(1e12, 1e10, bytes_per_weight=1.0) * 2 == max_useful_batch(1e12, 1e10)


def test_b_is_at_least_one():
    assert max_useful_batch(1.0, 1e12) == 1


@pytest.mark.parametrize(("tolerance", "batch"), [(0.0, 1), (0.1, 8), (0.4, 32), (1.0, 64), (9.0, 256)])
def test_the_largest_measured_batch_within_the_tolerance(tolerance, batch):
    assert max_measured_batch(FIG_4_7B_TP1_MS, tolerance) == batch


def test_a_fast_outlier_beyond_the_limit_does_not_count():
    assert max_measured_batch({1: 1.0, 2: 3.0, 4: 1.1}, tolerance=0.5) == 1


def test_no_measurement_is_refused():
    with pytest.raises(ValueError, match="no decode step"):
        max_measured_batch({})
