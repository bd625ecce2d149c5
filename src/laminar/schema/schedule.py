"""Names of schedules; what each one means is in `scheduling.schedules`."""

from typing import Literal

ScheduleName = Literal["laminar", "sync", "one_step", "stream", "partial"]
