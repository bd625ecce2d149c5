"""How long a decode step takes: a roofline formula with two measured corrections (paper, Fig. 4).

    t(n, K) = factor * (max(W / (TP BW), 2 P n / (0.7 TP FLOPS)) + L * layer_s + K * kv / (0.82 TP BW) + a_TP * n)

for n sequences that hold K tokens of KV together: weights are read once per step (or, for many sequences, computed
with), every layer costs a fixed time, the whole KV is read once, and each sequence costs a little.
"""

from msgspec import Struct

from laminar.scheduling.roofline import FLOPS_PER_WEIGHT, Hardware


class ModelShape(Struct, frozen=True, kw_only=True):
    """What a model costs. `weight_bytes` in the number format that is served; `kv_bytes_per_token` over all layers."""

    num_parameters: float
    num_layers: int
    weight_bytes: float
    kv_bytes_per_token: float


class DecodeConstants(Struct, frozen=True, kw_only=True):
    """Measured corrections to the roofline. `per_sequence_s` goes by model and tensor parallelism."""

    layer_s: float
    kv_bandwidth_share: float
    flops_share: float
    prefill_flops_share: float
    per_sequence_s: dict[str, dict[int, float]]

    def sequence_s(self, model: str, tensor_parallel: int) -> float:
        """What one more sequence adds to a step; of the parallelisms that were measured the nearest counts."""
        measured = self.per_sequence_s[model]
        return measured[min(measured, key=lambda known: abs(known - tensor_parallel))]


class Pace(Struct, frozen=True, kw_only=True):
    """Decode and prefill of one replica: numbers for `step_s`. No step is shorter than `floor_s`."""

    weights_s: float
    gemm_s_per_sequence: float
    layers_s: float
    per_sequence_s: float
    per_kv_token_s: float
    prefill_tokens_per_s: float
    floor_s: float = 0.0

    def step_s(self, num_sequences: int, kv_tokens: float) -> float:
        """Seconds of one decode step, the floor not counted."""
        gemm_s = max(self.weights_s, self.gemm_s_per_sequence * num_sequences)
        return gemm_s + self.layers_s + self.per_sequence_s * num_sequences + self.per_kv_token_s * kv_tokens


def roofline_pace(
    model: ModelShape,
    hardware: Hardware,
    constants: DecodeConstants,
    *,
    tensor_parallel: int,
    sequence_s: float,
    latency_factor: float = 1.0,
    floor_s: float = 0.0,
) -> Pace:
    """The pace of `tensor_parallel` accelerators together.

    `sequence_s` is what one more sequence adds to a step; `latency_factor` stretches decoding, not prefill.
    """
    bandwidth = tensor_parallel * hardware.bandwidth_bytes_per_s
    flops = tensor_parallel * hardware.flops_per_s
    flops_per_token = FLOPS_PER_WEIGHT * model.num_parameters
    return Pace(
        weights_s=latency_factor * model.weight_bytes / bandwidth,
        gemm_s_per_sequence=latency_factor * flops_per_token / (constants.flops_share * flops),
        layers_s=latency_factor * model.num_layers * constants.layer_s,
        per_sequence_s=latency_factor * sequence_s,
        per_kv_token_s=latency_factor * model.kv_bytes_per_token / (constants.kv_bandwidth_share * bandwidth),
        prefill_tokens_per_s=constants.prefill_flops_share * flops / flops_per_token,
        floor_s=floor_s,
    )


def kv_capacity_tokens(
    model: ModelShape, hardware: Hardware, *, tensor_parallel: int, memory_share: float, reserved_bytes: float
) -> int:
    """Tokens whose KV fits beside weights and activations (`reserved_bytes` per accelerator); at least 0."""
    usable = tensor_parallel * (memory_share * hardware.memory_bytes - reserved_bytes) - model.weight_bytes
    return max(0, int(usable / model.kv_bytes_per_token))
