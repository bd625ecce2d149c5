"""KV memory in pages, and attention that reads them where they lie.

Decoding never gathers keys or values: every page is multiplied with the queries of the row that owns it, and the
partial results are then added up per row (softmax is associative once the maximum is known). All pages below the highest
one in use take part; a page without an owner is masked. Keys lie transposed, [head_dim, page], because that makes both
products plain batched GEMMs; on one Xeon core this is 2 to 3 times faster than scaled_dot_product_attention.

Axes: R rows of this iteration, N rows that decode, P pages, T tokens, H KV heads, G query heads per KV head, D head_dim.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

MASKED = -1e30
"""Finite, so that a page without valid tokens yields zeros and not NaN; within the range of bfloat16."""

LOG2_E = math.log2(math.e)
"""Softmax in base 2: exp2 costs the same for masked scores; exp is up to 30 times slower there on CPU (libmvec, MKL)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTables:
    """`decode_rows.PageView` on the device, plus the mask that follows from it ([P, 1, page], 0 or MASKED)."""

    owner_P: Tensor
    table: Tensor
    width: int
    mask_P1T: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkView:
    """Prompt tokens start..stop of one request, as rows first..last of this iteration; `pages` hold 0..stop."""

    first: int
    last: int
    start: int
    stop: int
    pages: Tensor


def page_mask(valid_P: Tensor, page_tokens: int, dtype: torch.dtype) -> Tensor:
    """0 where a page's token counts, MASKED elsewhere."""
    place_T = torch.arange(page_tokens, device=valid_P.device)
    return (place_T >= valid_P.unsqueeze(1)).to(dtype).mul_(MASKED).unsqueeze(1)


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
        self._scale = head_dim**-0.5
        self._page_tokens = page_tokens

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
        self._keys[layer][page_R, :, :, offset_R] = key_RHD
        self._values[layer][page_R, :, offset_R] = value_RHD

    def attend_decode(self, layer: int, query_NHGD: Tensor, tables: PageTables) -> Tensor:
        """One query token per row against all its pages; [N, H * G * D]."""
        num_rows, num_heads, group, head_dim = query_NHGD.shape
        span = len(tables.owner_P)
        keys = self._keys[layer, :span].view(-1, head_dim, self._page_tokens)
        values = self._values[layer, :span].view(-1, self._page_tokens, head_dim)
        query = query_NHGD.index_select(0, tables.owner_P).view(-1, group, head_dim)
        mask = tables.mask_P1T.expand(-1, num_heads, -1).reshape(-1, 1, self._page_tokens)
        scores = torch.baddbmm(mask.expand(-1, group, -1), query, keys, alpha=self._scale * LOG2_E).float()

        page_max = scores.amax(-1).view(span, -1)
        row_max = page_max.index_select(0, tables.table).view(num_rows, tables.width, -1).amax(1)
        scores.sub_(row_max.index_select(0, tables.owner_P).view(-1, group, 1)).exp2_()

        total = scores.new_zeros(num_rows, num_heads * group)
        total.index_add_(0, tables.owner_P, scores.sum(-1).view(span, -1))
        mixed = torch.bmm(scores.to(values.dtype), values).float().view(span, -1, head_dim)
        output = scores.new_zeros(num_rows, num_heads * group, head_dim).index_add_(0, tables.owner_P, mixed)
        return output.div_(total.unsqueeze(-1)).to(query_NHGD.dtype).flatten(1)

    def attend_chunk(
        self, layer: int, query_THGD: Tensor, key_THD: Tensor, value_THD: Tensor, chunk: ChunkView
    ) -> Tensor:
        """The chunk's tokens against everything before them; [T, H * G * D]. Its own KV was written before."""
        query = query_THGD.permute(1, 2, 0, 3)
        if chunk.start == 0:
            key, value, mask = key_THD.transpose(0, 1), value_THD.transpose(0, 1), None
        else:
            key = self._keys[layer].index_select(0, chunk.pages).permute(1, 0, 3, 2).flatten(1, 2)[:, : chunk.stop]
            value = self._values[layer].index_select(0, chunk.pages).transpose(0, 1).flatten(1, 2)[:, : chunk.stop]
            place = torch.arange(chunk.stop, device=query.device)
            mask = place <= place[chunk.start :].unsqueeze(1)
        key, value = (x.unsqueeze(1).expand(-1, query.shape[1], -1, -1) for x in (key, value))
        output = scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        return output.permute(2, 0, 1, 3).flatten(1)
