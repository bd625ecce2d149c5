"""How messages travel between a service and its worker processes."""

import struct
from typing import Final

FRAME_HEADER: Final = struct.Struct("<I")
"""A message on the socket is its length, then its msgpack."""
