"""The decoder of the Llama, Qwen2 and Qwen3 families on our own KV pages.

Tensors are named as in a Hugging Face state dict; query/key/value and gate/up are fused when they are loaded.
Axes: R rows (tokens of this iteration: first N that decode, then prompt tokens), H KV heads, G query heads per KV head,
D head_dim.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from laminar.engines.decoder_shape import DecoderShape
from laminar.engines.paged_kv import ChunkView, PagedKV, PageTables
from laminar.engines.projection import Projection, rms_norm
from laminar.engines.rope import interleave, rotate, rotations


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tokens of one iteration and where their KV goes; `tables` is None if nothing decodes."""

    token_ids_R: Tensor
    positions_R: Tensor
    pages_R: Tensor
    offsets_R: Tensor
    num_decode: int
    tables: PageTables | None
    chunks: list[ChunkView]


@dataclass(frozen=True, slots=True)
class Part:
    """Checkpoint tensors that are loaded together: their names and shapes, and what takes them in this order."""

    names: list[str]
    shapes: list[tuple[int, ...]]
    load: Callable[[list[Tensor]], object]


class Layer:
    """Weights of one decoder layer."""

    def __init__(self, shape: DecoderShape, dtype: torch.dtype, device: torch.device) -> None:
        heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

        def projection(inputs: int, outputs: list[int], bias: bool) -> Projection:
            return Projection(inputs, outputs, bias=bias, dtype=dtype, device=device)

        def scale(size: int) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._head_dim = shape.head_dim
        self.qkv = projection(shape.hidden, [heads, kv_heads, kv_heads], shape.qkv_bias)
        self.output = projection(heads, [shape.hidden], shape.output_bias)
        self.gate_up = projection(shape.hidden, [shape.mlp, shape.mlp], shape.mlp_bias)
        self.down = projection(shape.mlp, [shape.hidden], shape.mlp_bias)
        self.attention_norm, self.mlp_norm = scale(shape.hidden), scale(shape.hidden)
        self.query_norm = scale(shape.head_dim) if shape.qk_norm else None
        self.key_norm = scale(shape.head_dim) if shape.qk_norm else None

    def parts(self, prefix: str) -> Iterator[Part]:
        """Query and key rows are reordered for `rope.rotate` on their way in."""
        yield _vector(f"{prefix}.input_layernorm.weight", self.attention_norm)
        yield _vector(f"{prefix}.post_attention_layernorm.weight", self.mlp_norm)
        for name, norm in (("q", self.query_norm), ("k", self.key_norm)):
            if norm is not None:
                yield _vector(f"{prefix}.self_attn.{name}_norm.weight", norm, reorder=self._interleave)
        for projection, names in (
            (self.qkv, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            (self.output, ["self_attn.o_proj"]),
            (self.gate_up, ["mlp.gate_proj", "mlp.up_proj"]),
            (self.down, ["mlp.down_proj"]),
        ):
            for kind, shapes, load in (
                ("weight", projection.weight_shapes, projection.load_weights),
                ("bias", projection.bias_shapes, projection.load_biases),
            ):
                if shapes:
                    into = self._interleaved(load) if projection is self.qkv else load
                    yield Part([f"{prefix}.{name}.{kind}" for name in names], shapes, into)

    def _interleave(self, rows: Tensor) -> Tensor:
        return interleave(rows, self._head_dim)

    def _interleaved(self, load: Callable[[list[Tensor]], None]) -> Callable[[list[Tensor]], None]:
        return lambda qkv: load([self._interleave(qkv[0]), self._interleave(qkv[1]), qkv[2]])


def _vector(name: str, target: Tensor, reorder: Callable[[Tensor], Tensor] = lambda rows: rows) -> Part:
    return Part([name], [tuple(target.shape)], lambda given: target.copy_(reorder(given[0])))


class Llama:
    """Decoder weights and the forward pass; `load` replaces all weights."""

    def __init__(self, shape: DecoderShape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self._layers = [Layer(shape, dtype, device) for _ in range(shape.num_layers)]
        self._final_norm = torch.zeros(shape.hidden, dtype=dtype, device=device)
        self._head = Projection(shape.hidden, [shape.vocab], bias=False, dtype=dtype, device=device)
        embedding = self._head.plain_NK if shape.tied else None
        if embedding is None:
            embedding = torch.zeros(shape.vocab, shape.hidden, dtype=dtype, device=device)
        self._embedding = embedding
        self._rotations = rotations(shape.head_dim, shape.max_positions, shape.rope).to(device)

    def parts(self) -> Iterator[Part]:
        """Every tensor that a checkpoint must bring; a tied head takes the embedding."""
        if self._embedding is not self._head.plain_NK:
            yield _vector("model.embed_tokens.weight", self._embedding)
        head = "model.embed_tokens.weight" if self._shape.tied else "lm_head.weight"
        yield Part([head], self._head.weight_shapes, self._head.load_weights)
        yield _vector("model.norm.weight", self._final_norm)
        for index, layer in enumerate(self._layers):
            yield from layer.parts(f"model.layers.{index}")

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take every weight; raises ValueError before the first one is touched if one is missing or misshapen."""
        loads: list[tuple[Part, list[Tensor]]] = []
        for part in self.parts():
            given = []
            for name, needed in zip(part.names, part.shapes, strict=True):
                if name not in tensors:
                    raise ValueError(f"the weights lack {name}")
                given.append(tensors[name])
                if (shape := tuple(given[-1].shape)) != needed:
                    raise ValueError(f"{name} has shape {shape}, the model needs {needed}")
            loads.append((part, given))
        for part, given in loads:
            part.load(given)

    def forward(self, batch: Batch, kv: PagedKV) -> Tensor | None:
        """Logits of the rows that decode (None if there are none); KV of all rows is written."""
        shape, num_decode = self._shape, batch.num_decode
        x_RE = self._embedding.index_select(0, batch.token_ids_R)
        rotations_RD = self._rotations.index_select(0, batch.positions_R)
        for index, layer in enumerate(self._layers):
            query_RHGD, key_RHD, value_RHD = self._query_key_value(layer, x_RE, rotations_RD)
            kv.write(index, key_RHD, value_RHD, batch.pages_R, batch.offsets_R)
            is_last = index == shape.num_layers - 1
            if is_last:  # of prompt tokens only the KV is wanted
                if not num_decode:
                    return None
                x_RE = x_RE[:num_decode]
            mixed = attend(query_RHGD, key_RHD, value_RHD, layer=index, batch=batch, with_chunks=not is_last, kv=kv)
            x_RE = layer.output(mixed, onto_RN=x_RE)
            gate_up = layer.gate_up(rms_norm(x_RE, layer.mlp_norm, shape.norm_eps))
            x_RE = layer.down(silu(gate_up[:, : shape.mlp]).mul_(gate_up[:, shape.mlp :]), onto_RN=x_RE)
        return self._head(rms_norm(x_RE, self._final_norm, shape.norm_eps))

    def _query_key_value(self, layer: Layer, x_RE: Tensor, rotations_RD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = self._shape
        qkv = layer.qkv(rms_norm(x_RE, layer.attention_norm, shape.norm_eps))
        heads_RHD = qkv.view(len(qkv), -1, shape.head_dim)
        query_key, value_RHD = torch.split(heads_RHD, [shape.num_heads + shape.num_kv_heads, shape.num_kv_heads], 1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = torch.split(query_key, [shape.num_heads, shape.num_kv_heads], 1)
            query = rms_norm(query, layer.query_norm, shape.norm_eps)
            query_key = torch.cat([query, rms_norm(key, layer.key_norm, shape.norm_eps)], 1)
        rotated = rotate(query_key, rotations_RD)
        query_RHD, key_RHD = torch.split(rotated, [shape.num_heads, shape.num_kv_heads], 1)
        return torch.unflatten(query_RHD, 1, (shape.num_kv_heads, -1)), key_RHD, value_RHD


def attend(
    query_RHGD: Tensor, key_RHD: Tensor, value_RHD: Tensor, *, layer: int, batch: Batch, with_chunks: bool, kv: PagedKV
) -> Tensor:
    """Attention of the rows: those that decode at once, prompt chunks one by one."""
    parts = []
    if batch.tables is not None:
        parts.append(kv.attend_decode(layer, query_RHGD[: batch.num_decode], batch.tables))
    for chunk in batch.chunks if with_chunks else ():
        rows = slice(chunk.first, chunk.last)
        parts.append(kv.attend_chunk(layer, query_RHGD[rows], key_RHD[rows], value_RHD[rows], chunk))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
