"""Frameworks for RL post-training, by what their configuration can express of a plan."""

from ir.backend import Backend
from ir.frameworks.rlinf import RLINF
from ir.frameworks.roll import ROLL
from ir.frameworks.slime import SLIME
from ir.frameworks.vllm_args import VLLM_ARGS

FRAMEWORKS: tuple[Backend, ...] = (RLINF, ROLL, SLIME, VLLM_ARGS)
