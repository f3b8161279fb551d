"""The words in which a graph is shown: numbers with units, models, layouts, edges."""

from __future__ import annotations

from ir.graph import ROLE_OF, Data, Layout, Op, PoolSpan, Rpeg, Stage, State, StateEdge
from ir.job import Role
from ir.sizes import sequence_tokens

DATA_WORDS = {
    Data.TOKENS: "tokens",
    Data.ROLLOUT_LOGPROB: "rollout log-probs",
    Data.GREEDY_TOKENS: "greedy tokens",
    Data.REWARD: "rewards",
    Data.REFERENCE_LOGPROB: "reference log-probs",
    Data.TEACHER_LOGPROB: "teacher log-probs",
    Data.OLD_LOGPROB: "old log-probs",
    Data.VALUES: "values",
    Data.ADVANTAGE: "advantages",
    Data.RETURNS: "returns",
}

STATE_WORDS = {
    State.ACTOR_WEIGHTS: "actor weights",
    State.CRITIC_WEIGHTS: "critic weights",
    State.ACTOR_OPTIMIZER: "actor optimizer",
    State.CRITIC_OPTIMIZER: "critic optimizer",
    State.EXPERIENCE: "experience",
}

_UNITS = ("", "k", "M", "G", "T", "P")


def bytes_text(value: float) -> str:
    """Decimal units, three digits: 16.4 GB."""
    return f"{_scaled(value, _UNITS)}B"


def state_text(edge: StateEdge, size: float) -> str:
    """Of a state of so many bytes, what travels: just its changes, if the method says so."""
    return f"changes of {bytes_text(size)}" if edge.method.startswith("delta") else bytes_text(size)


def parameters_text(value: float) -> str:
    """Three digits: 8.19 B."""
    return _scaled(value, ("", "k", "M", "B", "T")).strip()


def count_text(value: float) -> str:
    """Whole, with commas up to a million; beyond in millions or billions."""
    return f"{value:,.0f}" if value < 999_999.5 else _scaled(value, ("", "k", "M", "B", "T"))


def _scaled(value: float, units: tuple[str, ...]) -> str:
    power = 0
    while power + 1 < len(units) and float(f"{value:.3g}") >= 1000:
        value, power = value / 1000, power + 1
    number = f"{value:.0f}" if float(f"{value:.3g}") >= 100 else f"{value:.3g}"
    return f"{number} {units[power]}"


def devices_text(pool: PoolSpan, rpeg: Rpeg) -> str:
    """devices 0-7, with the group where the plan uses several."""
    last = pool.first_device + pool.devices - 1
    numbers = f"device {last}" if pool.devices == 1 else f"devices {pool.first_device}-{last}"
    return f"{numbers} of group {pool.group}" if any(other.group for other in rpeg.pools) else numbers


def job_text(rpeg: Rpeg) -> str:
    """Algorithm, sequences and lengths in one line."""
    w, tokens = rpeg.job.workload, sequence_tokens(rpeg.job)
    lengths = f"{_length(tokens.prompt)} + {_length(tokens.response)} tokens"
    meaning = "prompt + response on average" if tokens.known else "at most, for the lengths are unknown"
    batch = f"{w.prompts_per_step:,} prompts x {w.samples_per_prompt:,} samples = {w.sequences:,} sequences a step"
    return f"{rpeg.job.algorithm.name}, {batch}, {lengths} ({meaning})"


def _length(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens >= 100 else f"{tokens:.3g}"


def roles_of(stage: Stage, rpeg: Rpeg) -> tuple[Role, ...]:
    """The roles whose models a stage computes with, each once, in the order of its operations."""
    used = [ROLE_OF[op] for op in stage.ops if op in ROLE_OF and op is not Op.SYNC_WEIGHTS]
    return tuple(role for role in dict.fromkeys(used) if role in rpeg.job.models)


def role_of(op: Op, rpeg: Rpeg) -> Role | None:
    """The role whose model an operation uses, None if it uses none."""
    role = ROLE_OF.get(op)
    return role if role in rpeg.job.models else None


def model_name(role: Role, rpeg: Rpeg) -> str:
    """What the job calls a model: its name, or the directory it lies in; a reference that is not given is the actor."""
    models = rpeg.job.document.models
    source = getattr(models, role.value) or models.actor
    if source.name is not None:
        return str(source.name)
    parts = [part for part in str(source.path).split("/") if part not in ("", ".", "..", "config.json")]
    return parts[-1] if parts else str(source.path)


def model_text(role: Role, rpeg: Rpeg) -> str:
    """Qwen/Qwen3-8B, 36 layers x 4,096, 8.19 B parameters."""
    shape = rpeg.job.models[role]
    active = f", {parameters_text(shape.active_parameters)} active" if shape.is_moe else ""
    lora = f", adapters of rank {shape.lora_rank}" if shape.lora_rank else ""
    size = f"{shape.layers} layers x {shape.hidden:,}, {parameters_text(shape.parameters)} parameters"
    return f"{model_name(role, rpeg)}, {size}{active}{lora}"


def short_model(role: Role, rpeg: Rpeg) -> str:
    """Role and size where it has weights of its own, else whose it runs on."""
    shape, host = rpeg.job.models[role], rpeg.weights_of(role)
    if host is not role:
        return f"{role} on the {host}'s {'weights' if role is Role.REFERENCE else 'trunk'}"
    active = f"-A{parameters_text(shape.active_parameters)}" if shape.is_moe else ""
    return f"{role} {parameters_text(shape.parameters)}{active}"


def layout_words(stage: Stage, rpeg: Rpeg) -> tuple[str, ...]:
    """A stage's layout, a phrase for each thing that differs from the plainest form."""
    layout = stage.layout
    if not roles_of(stage, rpeg):
        return (_plural(layout.ranks, "device"),)
    if Op.GENERATE in stage.ops:
        return (_replicas(layout, "engine"), *_engine_words(layout), *_other_words(layout))
    words = _pass_words(layout)
    return words if stage.partner is None else (*words, f"critic: {', '.join(_pass_words(stage.partner))}")


def _pass_words(layout: Layout) -> tuple[str, ...]:
    return (_replicas(layout, "replica"), *_batch_words(layout), *_other_words(layout))


def _replicas(layout: Layout, what: str) -> str:
    degrees = [f"{name} {value}" for name in ("tp", "pp", "cp") if (value := getattr(layout, name)) > 1]
    return f"{_plural(layout.dp, what)}{' of ' if degrees else ''}{' x '.join(degrees)}"


def _engine_words(layout: Layout) -> list[str]:
    words = [f"{_plural(layout.micro_batch, 'sequence')} each"]
    words += [f"{layout.memory_percent}% of memory"] if layout.memory_percent else []
    words += [f"prefill by {layout.micro_tokens:,} tokens"] if layout.micro_tokens else []
    return words + ([f"{_plural(layout.draft_tokens, 'token')} guessed"] if layout.draft_tokens else [])


def _batch_words(layout: Layout) -> list[str]:
    if layout.micro_tokens:
        return [f"micro-batch {layout.micro_tokens:,} tokens"]
    return [f"micro-batch {layout.micro_batch:,}"] if layout.micro_batch else []


def _other_words(layout: Layout) -> list[str]:
    words = [
        (layout.vpp > 1, f"vpp {layout.vpp}"),
        (layout.schedule != "1f1b", layout.schedule),
        (layout.ep > 1, f"ep {layout.ep}"),
        (layout.etp > 1, f"etp {layout.etp}"),
        (layout.zero > 0, f"zero {layout.zero}" + f" over {layout.shard}" * (layout.shard > 0)),
        (layout.recompute != "none", f"recompute {layout.recompute}"),
        (layout.offload != "none", f"offload {layout.offload}"),
        (layout.precision != "native", layout.precision),
    ]
    return [word for said, word in words if said]


def bound_text(edge: StateEdge) -> str:
    """k = 2, in flight."""
    return f"k = {edge.staleness}" + (", in flight" if edge.in_flight else "")


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
