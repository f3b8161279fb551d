"""Frameworks for RL post-training, by what their configuration can express of a plan."""

from ir.backend import Backend
from ir.frameworks.verl import VERL

FRAMEWORKS: tuple[Backend, ...] = (VERL,)
