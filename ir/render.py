"""The graph for a reader: as a tree of text, as Mermaid, and (see `ir.render_svg`) as a drawing.

All are pure functions of the RPEG and show the same facts: who runs what where, what
travels within a step, and what crosses steps with which bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from ir.graph import BYTES_PER_SEQUENCE, DataEdge, Op, PoolSpan, Rpeg, Stage, State, StateEdge
from ir.job import Role
from ir.render_svg import svg
from ir.render_words import (
    DATA_WORDS,
    STATE_WORDS,
    bound_text,
    bytes_text,
    count_text,
    devices_text,
    job_text,
    layout_words,
    model_text,
    roles_of,
    short_model,
    state_text,
)
from ir.sizes import BYTES_PER_TOKEN, edge_bytes, edge_values, state_bytes, waiting_sequences

T = TypeVar("T")

__all__ = ["mermaid", "svg", "tree_text"]

# Tree


def tree_text(rpeg: Rpeg) -> str:
    """The step as a tree: models, pools with their stages, data edges, state edges. Sizes are of a whole step."""
    sections: tuple[tuple[str, list[tuple[str, list[str]]]], ...] = (
        ("models", [(line, []) for line in _models(rpeg)]),
        ("pools", [(_pool_line(pool, rpeg), _stages_of(pool, rpeg)) for pool in rpeg.pools]),
        ("data within a step", [(_data_line(edge, rpeg), []) for edge in rpeg.data]),
        ("state between steps", [(_state_line(edge, rpeg), []) for edge in rpeg.state]),
    )
    lines = [f"{rpeg.job.document.name}: {job_text(rpeg)}"]
    for title, children, below in _branches(sections):
        lines.append(title)
        for text, leaves, deeper in _branches(children):
            lines.append(below + text)
            lines += [below + deeper + leaf for leaf, _, _ in _branches([(leaf, []) for leaf in leaves])]
    return "\n".join(lines) + "\n"


def _branches(items: Sequence[tuple[str, T]]) -> Iterator[tuple[str, T, str]]:
    """Each item's text with its branch, what hangs below it, and the indent of that."""
    for i, (text, children) in enumerate(items):
        last = i == len(items) - 1
        yield ("└─ " if last else "├─ ") + text, children, "   " if last else "│  "


def _models(rpeg: Rpeg) -> list[str]:
    roles = list(rpeg.job.models)
    lines = [f"{role}: {_model_line(role, rpeg)}" for role in roles]
    scored = rpeg.stage_of(Op.REWARD) is not None and Role.REWARD not in roles
    return lines + (["reward: a verifier, no model"] if scored else [])


def _model_line(role: Role, rpeg: Rpeg) -> str:
    host = rpeg.weights_of(role)
    if host is role:
        return model_text(role, rpeg)
    how = "the actor's weights, adapter off" if role is Role.REFERENCE else f"a head on the {host}'s trunk"
    return f"no weights of its own: {how}"


def _pool_line(pool: PoolSpan, rpeg: Rpeg) -> str:
    return f"{pool.name}: {devices_text(pool, rpeg)} ({pool.devices:,} in all)"


def _stages_of(pool: PoolSpan, rpeg: Rpeg) -> list[str]:
    return [_stage_line(stage, rpeg) for stage in rpeg.stages if stage.pool == pool.name]


def _stage_line(stage: Stage, rpeg: Rpeg) -> str:
    ops = " + ".join(f"({op})" if op in stage.riders else str(op) for op in stage.ops)
    model = " and ".join(_sized(role, rpeg) for role in roles_of(stage, rpeg))
    verified = Op.REWARD in stage.ops and Role.REWARD not in rpeg.job.models
    who = " and ".join(part for part in (model, "verifier" if verified else "") if part)
    return f"{ops}: {who}{'; ' if who else ''}{', '.join(layout_words(stage, rpeg))}"


def _sized(role: Role, rpeg: Rpeg) -> str:
    shape = rpeg.job.models[role]
    own = rpeg.weights_of(role) is role
    return short_model(role, rpeg) + (f" ({shape.layers} x {shape.hidden:,})" if own else "")


def _data_line(edge: DataEdge, rpeg: Rpeg) -> str:
    return f"{edge.source} -> {edge.target}: {_data_label(edge, rpeg)}"


def _data_label(edge: DataEdge, rpeg: Rpeg) -> str:
    unit = "a sequence" if edge.data in BYTES_PER_SEQUENCE else "a token"
    each = f"{BYTES_PER_SEQUENCE.get(edge.data, BYTES_PER_TOKEN)} bytes {unit}"
    size = f"{count_text(edge_values(rpeg, edge))} x {each} = {bytes_text(edge_bytes(rpeg, edge))}"
    inside = rpeg.stage(edge.source) is rpeg.stage(edge.target)
    how = ", within the stage" if inside else ", streamed" if edge.streamed else ""
    return f"{DATA_WORDS[edge.data]}, {size}{how}"


def _state_line(edge: StateEdge, rpeg: Rpeg) -> str:
    return f"{edge.source} -> {edge.target}: {_state_label(edge, rpeg)}"


def _state_label(edge: StateEdge, rpeg: Rpeg) -> str:
    method = f", {edge.method}" if edge.method else ""
    waiting = edge.state is State.EXPERIENCE
    buffer = f", up to {waiting_sequences(rpeg, edge):,} sequences" if waiting else ""
    return f"{STATE_WORDS[edge.state]}, {bound_text(edge)}{method}{buffer}, {state_text(edge, state_bytes(rpeg, edge))}"


# Mermaid


def mermaid(rpeg: Rpeg) -> str:
    """A Mermaid flowchart: a subgraph a pool, solid arrows for data, dotted ones for state. A stage's own state and
    data are loops; new weights go from the update to their way back."""
    lines = ["flowchart LR"]
    for i, pool in enumerate(rpeg.pools):
        lines.append(f'  subgraph pool{i}["{_quoted(f"{pool.name}: {devices_text(pool, rpeg)}")}"]')
        lines += [f"    {_node(stage, rpeg)}" for stage in rpeg.stages if stage.pool == pool.name]
        lines.append("  end")
    lines += [_arrow(rpeg, edge.source, "-->", _data_label(edge, rpeg), edge.target) for edge in rpeg.data]
    lines.append(_arrow(rpeg, Op.UPDATE_ACTOR, "-->", "new weights", Op.SYNC_WEIGHTS))
    lines += [_arrow(rpeg, edge.source, "-.->", _state_label(edge, rpeg), edge.target) for edge in rpeg.state]
    return "\n".join(lines) + "\n"


def _node(stage: Stage, rpeg: Rpeg) -> str:
    models = [short_model(role, rpeg) for role in roles_of(stage, rpeg)]
    text = "<br/>".join([" + ".join(stage.ops), *models, ", ".join(layout_words(stage, rpeg))])
    return f'{_id(stage)}["{_quoted(text)}"]'


def _arrow(rpeg: Rpeg, source: Op, arrow: str, label: str, target: Op) -> str:
    return f'  {_id(rpeg.stage(source))} {arrow}|"{_quoted(label)}"| {_id(rpeg.stage(target))}'


def _id(stage: Stage) -> str:
    return stage.name.replace("+", "__")


def _quoted(text: str) -> str:
    return text.replace('"', "#quot;")
