"""Frameworks for RL post-training, by what their configuration can express of a plan."""

from ir.backend import Backend
from ir.frameworks.rlinf import RLINF
from ir.frameworks.roll import ROLL
from ir.frameworks.slime import SLIME

FRAMEWORKS: tuple[Backend, ...] = (RLINF, ROLL, SLIME)
