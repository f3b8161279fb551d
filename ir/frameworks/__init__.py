"""Frameworks for RL post-training, by what their configuration can express of a plan."""

from ir.backend import Backend
from ir.frameworks.areal import AREAL
from ir.frameworks.deepspeed_json import DEEPSPEED_JSON
from ir.frameworks.nemo_rl import NEMO_RL
from ir.frameworks.openrlhf import OPENRLHF
from ir.frameworks.rlinf import RLINF
from ir.frameworks.roll import ROLL
from ir.frameworks.slime import SLIME
from ir.frameworks.trl import TRL
from ir.frameworks.verl import VERL
from ir.frameworks.vllm_args import VLLM_ARGS

FRAMEWORKS: tuple[Backend, ...] = (AREAL, DEEPSPEED_JSON, NEMO_RL, OPENRLHF, RLINF, ROLL, SLIME, TRL, VERL, VLLM_ARGS)
