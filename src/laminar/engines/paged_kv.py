"""KV memory in pages, and attention that reads them where they lie.

Decoding never gathers keys or values: every page is multiplied with the queries of the row that owns it, and the
partial results are then added up per row. All pages below the highest one in use take part; a page without an owner is
masked. Keys lie transposed, [head_dim, page], because that makes both products plain batched GEMMs: on one Xeon core 2
to 3 times as fast as scaled_dot_product_attention.

Axes: R rows of this iteration, N of them decode, P pages, T places in a page, H KV heads, G query heads per KV head,
D head_dim.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

MASKED = -1e30
"""Finite, so that a page without valid tokens yields zeros and not NaN; within the range of bfloat16."""

LOG2_E = math.log2(math.e)
"""Softmax in base 2: exp2 costs the same for masked scores; exp is up to 30 times slower there on CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTables:
    """`decode_rows.PageView` on the device, and the mask that follows from it ([P * H, G, page], 0 or MASKED)."""

    owner_P: Tensor
    table: Tensor
    width: int
    mask: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkView:
    """Prompt tokens start..stop of one request, as rows first..last of this iteration; `pages` hold 0..stop.

    `count` such prompts may follow each other if they start at 0 and are equally long; then `pages` is unused.
    """

    first: int
    last: int
    count: int
    start: int
    stop: int
    pages: Tensor


class PagedKV:
    """Keys [layer, P, H, D, page] and values [layer, P, H, page, D], allocated once."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_tokens: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_pages + 1, num_kv_heads)  # one more: page 0 is padding
        self._keys = torch.zeros(*shape, head_dim, page_tokens, dtype=dtype, device=device)
        self._values = torch.zeros(*shape, page_tokens, head_dim, dtype=dtype, device=device)
        self._layers = list(zip(self._keys, self._values, strict=True))
        self._place_T = torch.arange(page_tokens, device=device)
        self._scale = head_dim**-0.5

    @property
    def dtype(self) -> torch.dtype:
        return self._keys.dtype

    @property
    def num_bytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def clear(self) -> None:
        """Forget all content, so that nothing that old weights computed (not even a NaN) outlives them."""
        self._keys.zero_()
        self._values.zero_()

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole pages in all layers, (from, to); no page is both."""
        pairs = torch.tensor(copies, device=self._keys.device)
        for memory in (self._keys, self._values):
            memory[:, pairs[:, 1]] = memory[:, pairs[:, 0]]

    def write(self, layer: int, key_RHD: Tensor, value_RHD: Tensor, page_R: Tensor, offset_R: Tensor) -> None:
        keys, values = self._layers[layer]
        keys[page_R, :, :, offset_R] = key_RHD
        values[page_R, :, offset_R] = value_RHD

    def mask(self, valid_P: Tensor, group: int) -> Tensor:
        """0 where a page's token counts, MASKED elsewhere, for every KV head; the same for all layers."""
        mask_PT = (self._place_T >= valid_P.unsqueeze(1)).to(self._keys.dtype).mul_(MASKED)
        heads, page_tokens = self._keys.shape[2], len(self._place_T)
        return mask_PT.unsqueeze(1).expand(-1, heads, -1).reshape(-1, 1, page_tokens).expand(-1, group, -1)

    def attend_decode(self, layer: int, query_NHGD: Tensor, tables: PageTables) -> Tensor:
        """One query token per row against all its pages; [N, H * G * D]."""
        num_rows, num_heads, group, head_dim = query_NHGD.shape
        owner, span = tables.owner_P, len(tables.owner_P)
        keys, values = (memory[:span].flatten(0, 1) for memory in self._layers[layer])
        query = query_NHGD.index_select(0, owner).view(-1, group, head_dim)
        scores = torch.baddbmm(tables.mask, query, keys, alpha=self._scale * LOG2_E).float()

        page_max = scores.amax(-1).view(span, -1)
        row_max = page_max.index_select(0, tables.table).view(num_rows, tables.width, -1).amax(1)
        scores.sub_(row_max.index_select(0, owner).view(-1, group, 1)).exp2_()

        page_sum = scores.sum(-1).view(span, -1)
        page_mix = torch.bmm(scores.to(values.dtype), values).float().view(span, -1, head_dim)
        total = page_sum.new_zeros(num_rows, num_heads * group).index_add_(0, owner, page_sum)
        mixed = page_mix.new_zeros(num_rows, num_heads * group, head_dim).index_add_(0, owner, page_mix)
        return mixed.div_(total.unsqueeze(-1)).to(query_NHGD.dtype).flatten(1)

    def attend_chunk(
        self, layer: int, query_RHGD: Tensor, key_RHD: Tensor, value_RHD: Tensor, chunk: ChunkView
    ) -> Tensor:
        """The chunk's tokens against everything before them; [R, H * G * D]. Its own KV was written before.

        Several whole prompts of one length are one batch (axis C); they see nothing but themselves.
        """
        query, key, value = (
            torch.unflatten(x, 0, (chunk.count, -1)).movedim(1, -2) for x in (query_RHGD, key_RHD, value_RHD)
        )
        mask = None
        if chunk.start > 0:
            keys, values = (memory.index_select(0, chunk.pages) for memory in self._layers[layer])
            key = keys.permute(1, 0, 3, 2).flatten(1, 2)[:, : chunk.stop].unsqueeze(0)
            value = values.transpose(0, 1).flatten(1, 2)[:, : chunk.stop].unsqueeze(0)
            place = torch.arange(chunk.stop, device=query.device)
            mask = place <= place[chunk.start :].unsqueeze(1)
        shape = (-1, -1, query.shape[2], -1, -1)
        key, value = (x.unsqueeze(2).expand(shape).flatten(1, 2) for x in (key, value))
        mixed = scaled_dot_product_attention(query.flatten(1, 2), key, value, mask, is_causal=mask is None)
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)
