"""Token ids and log-probs packed into bytes: small on the wire, free to slice, no copy to view.

Layout: little-endian int32 per token id, little-endian float32 per log-prob; so `len(packed) // 4` counts both.
"""

import sys
from array import array
from collections.abc import Iterable

ITEM_BYTES = 4
"""Bytes of one packed token id, and of one packed log-prob."""

_SWAP = sys.byteorder == "big"


def _pack(typecode: str, values: Iterable[float]) -> bytes:
    packed = array(typecode, values)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def _unpack(typecode: str, packed: bytes) -> list:  # type: ignore[type-arg]
    values = array(typecode)
    values.frombytes(packed)
    if _SWAP:
        values.byteswap()
    return values.tolist()


def pack_ids(token_ids: Iterable[int]) -> bytes:
    """Pack token ids as int32."""
    return _pack("i", token_ids)


def unpack_ids(packed: bytes) -> list[int]:
    """Inverse of `pack_ids`."""
    return _unpack("i", packed)


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """Pack log-probs as float32."""
    return _pack("f", logprobs)


def unpack_logprobs(packed: bytes) -> list[float]:
    """Inverse of `pack_logprobs`, up to float32 rounding."""
    return _unpack("f", packed)
