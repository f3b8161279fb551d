"""How much travels on an edge of the RPEG in one step, counted from the job alone.

Sizes are of whole batches and whole models: how a layout divides them among devices is
the model's affair. They are exact in what they count; the lengths are means.
"""

from __future__ import annotations

from dataclasses import dataclass

from ir.graph import BYTES_PER_SEQUENCE, ROLE_OF, Data, DataEdge, Op, Rpeg, State, StateEdge
from ir.job import Job
from ir.lengths import QuantileTable

BYTES_PER_TOKEN = 4
"""A token's id or a float32."""

BYTES_PER_WEIGHT = {"native": 2, "fp8": 1}
"""By the precision of the stage that reads them; native is taken to be bf16."""

OPTIMIZER_BYTES = 12
"""Of a trained parameter: fp32 master copy and Adam's two moments (Rajbhandari et al., arXiv:1910.02054, 3.1)."""

_WHOLE = (Data.TOKENS, Data.GREEDY_TOKENS)
"""Data that has a value for every token of a sequence; all else but rewards is about response tokens only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTokens:
    """Tokens of a sequence."""

    prompt: float
    response: float
    known: bool
    """Whether these are means of the job's lengths; else they are the most tokens allowed."""

    @property
    def total(self) -> float:
        """Prompt and response."""
        return self.prompt + self.response


def sequence_tokens(job: Job) -> SequenceTokens:
    """Mean tokens of a job's sequences, or the most allowed while its lengths are unknown."""
    tables, workload = job.lengths, job.workload
    if tables is None:
        return SequenceTokens(
            prompt=float(workload.max_prompt_tokens), response=float(workload.max_response_tokens), known=False
        )
    return SequenceTokens(prompt=_mean(tables.prompt), response=_mean(tables.response), known=True)


def _mean(table: QuantileTable) -> float:
    """Mean of a distribution whose quantile function is linear between points: the area below it."""
    p, v = table.probabilities, table.values
    return sum((p[i + 1] - p[i]) * (v[i] + v[i + 1]) / 2 for i in range(len(p) - 1))


def edge_sequences(rpeg: Rpeg, edge: DataEdge) -> float:
    """Sequences that an edge carries in a step: those trained on; before the selection of groups also those that it
    drops; of greedy responses one a prompt, whose rewards travel with the others. Abandoned ones never travel."""
    workload = rpeg.job.workload
    if edge.data is Data.GREEDY_TOKENS:
        return float(workload.prompts_per_step)
    greedy = workload.prompts_per_step if edge.data is Data.REWARD and rpeg.stage_of(Op.GREEDY) else 0
    selecting = rpeg.stage_of(Op.SELECT) is not None and edge.target in (Op.REWARD, Op.SELECT)
    return workload.sequences / ((workload.useful_groups or 1.0) if selecting else 1.0) + greedy


def edge_values(rpeg: Rpeg, edge: DataEdge) -> float:
    """Numbers that an edge carries in a step: one a sequence, a token, or a response token."""
    if edge.data in BYTES_PER_SEQUENCE:
        return edge_sequences(rpeg, edge)
    tokens = sequence_tokens(rpeg.job)
    return edge_sequences(rpeg, edge) * (tokens.total if edge.data in _WHOLE else tokens.response)


def edge_bytes(rpeg: Rpeg, edge: DataEdge) -> float:
    """Bytes that an edge carries in a step, over all sequences; padding is not counted. Means of the job's lengths are
    used, or the most tokens allowed while they are unknown."""
    return BYTES_PER_SEQUENCE.get(edge.data, BYTES_PER_TOKEN) * edge_values(rpeg, edge)


def state_bytes(rpeg: Rpeg, edge: StateEdge) -> float:
    """Bytes of state that cross steps: one copy of what is trained (adapters, or all weights) in the number format of
    the stage that reads it, the optimizer's state, or all responses that may wait."""
    if edge.state is State.EXPERIENCE:
        return waiting_sequences(rpeg, edge) * _bytes_per_waiting(rpeg)
    trained = rpeg.job.models[ROLE_OF[edge.source]].trainable_parameters
    if edge.state in (State.ACTOR_OPTIMIZER, State.CRITIC_OPTIMIZER):
        return float(OPTIMIZER_BYTES * trained)
    # Training keeps its weights in the native format even where it multiplies in fp8.
    reads_fp8 = edge.source is Op.SYNC_WEIGHTS and rpeg.stage(edge.target).layout.precision == "fp8"
    return float(BYTES_PER_WEIGHT["fp8" if reads_fp8 else "native"] * trained)


def waiting_sequences(rpeg: Rpeg, edge: StateEdge) -> int:
    """Most sequences that the experience of an edge with bound k holds: of the step being trained and k more."""
    return (1 + edge.staleness) * rpeg.job.workload.sequences


def _bytes_per_waiting(rpeg: Rpeg) -> float:
    """A waiting sequence's tokens, and the log-probs that its response was sampled with."""
    tokens = sequence_tokens(rpeg.job)
    return BYTES_PER_TOKEN * (tokens.total + tokens.response)
