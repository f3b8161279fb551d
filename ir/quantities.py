"""Numbers that documents hold, bounded: what is computed from them neither overflows nor stops being a number."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MOST = 10**9
"""Largest count: columns of plans are integers of 32 bits, which hold the sum of two."""
LARGEST = 1e30
"""Largest measure, in whatever unit."""

Positive = Annotated[int, Meta(ge=1, le=MOST)]
Natural = Annotated[int, Meta(ge=0, le=MOST)]
Bytes = Annotated[int, Meta(ge=1, le=2**62)]
PositiveFloat = Annotated[float, Meta(gt=0, le=LARGEST)]
NonNegative = Annotated[float, Meta(ge=0, le=LARGEST)]
Share = Annotated[float, Meta(ge=0, le=1)]
