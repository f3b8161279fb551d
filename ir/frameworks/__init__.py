"""Frameworks for RL post-training, by what their configuration can express of a plan."""

from ir.backend import Backend
from ir.frameworks.areal import AREAL
from ir.frameworks.nemo_rl import NEMO_RL

FRAMEWORKS: tuple[Backend, ...] = (AREAL, NEMO_RL)
