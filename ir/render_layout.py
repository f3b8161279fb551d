"""Where the boxes of a drawing are: a lane for each pool, a column for each point of the step.

Wires have free channels between columns and free bands above and below the lanes, so
that none has to cross a box; boxes take what width is left. Lengths are pixels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from ir.graph import ROLE_OF, Op, Rpeg, Stage, State
from ir.job import Role
from ir.render_words import bytes_text, layout_words, role_of, roles_of, short_model
from ir.sizes import state_bytes

WIDTH = 1200.0
"""Least width of a drawing; graphs of many columns are wider."""
MARGIN, HEADER = 14.0, 112.0
"""Around the drawing; left of the first column, for the names of the pools."""
PAD, LANE_PAD = 8.0, 12.0
"""Inside boxes, beside the text; in lanes, above and below the boxes."""
LEAST_BOX, MOST_BOX = 88.0, 200.0
LEAST_CHANNEL, WIRE_GAP = 16.0, 8.0
"""Between columns without wires; between wires side by side."""

NARROW, WIDE = "iljtfrI.,:;'|()[]/ -\u00a0", "mwMW%@"


@dataclass(frozen=True, slots=True)
class Style:
    """A kind of text line."""

    size: float
    bold: bool = False
    ink: str = "#1f2933"

    @property
    def leading(self) -> float:
        """From one baseline to the next."""
        return self.size + 4.0


OP = Style(11.0, bold=True)
RIDER = Style(11.0, ink="#5f6b77")
MODEL = Style(10.0)
LAYOUT = Style(9.5, ink="#46525e")
KEPT = Style(9.5, ink="#8a4b14")

GLUE = re.compile(r"(?<=\d) (?=[kMGTPB])|(?<=[tpcz]p|ro|ch) (?=\d)")
"""Spaces that a line is not broken at: within 16.4 GB, tp 2, zero 1, micro-batch 8."""

CHIP = 12.0
"""Width of the mark before an operation's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLine:
    """A line of text in a box."""

    text: str
    style: Style
    marked: bool = False
    """Whether a mark stands before it, as before each operation."""
    role: Role | None = None
    """Whose model the operation uses: the hue of the mark."""
    indent: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A stage drawn."""

    stage: Stage
    column: int
    lane: int
    lines: tuple[TextLine, ...]
    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """Its right edge."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """Its lower edge."""
        return self.y + self.height


def text_width(text: str, style: Style) -> float:
    """An estimate that the wide fonts among the usual sans-serif ones do not exceed."""
    ems = sum(0.42 if c in NARROW else 0.98 if c in WIDE else 0.76 if c.isupper() else 0.64 for c in text)
    return ems * style.size * (1.1 if style.bold else 1.0)


def wrap(text: str, style: Style, width: float) -> list[str]:
    """Lines that fit, broken at spaces and after underscores; a longer word is cut. Numbers stay with their units if
    there is room for both."""
    lines = [""]
    for word in _fitting_words(text, style, width):
        if lines[-1] and text_width((lines[-1] + word).rstrip(), style) > width:
            lines.append("")
        lines[-1] += word
    return [clip(line.rstrip().replace("\u00a0", " "), style, width) for line in lines]


def _fitting_words(text: str, style: Style, width: float) -> list[str]:
    words = []
    for word in _words(text):
        fits = text_width(word.rstrip(), style) <= width
        words += [word] if fits else word.replace("\u00a0", " \0").split("\0")
    return words


def _words(text: str) -> list[str]:
    return GLUE.sub("\u00a0", text).replace(" ", " \0").replace("_", "_\0").split("\0")


def clip(text: str, style: Style, width: float) -> str:
    """The text, its end cut off where it is too wide."""
    if text_width(text, style) <= width:
        return text
    while text and text_width(text + "…", style) > width:
        text = text[:-1]
    return text + "…"


def columns_of(rpeg: Rpeg) -> list[int]:
    """A stage's column: after what it takes data from, and after the stage before it on its pool. Stages of one
    column may run at the same time."""
    index = {op: i for i, stage in enumerate(rpeg.stages) for op in stage.ops}
    pairs = [(index[edge.source], index[edge.target]) for edge in rpeg.data]
    pairs.append((index[Op.UPDATE_ACTOR], index[Op.SYNC_WEIGHTS]))
    columns: list[int] = []
    for i, stage in enumerate(rpeg.stages):
        before = [source for source, target in pairs if target == i and source != i]
        before += [j for j in range(i) if rpeg.stages[j].pool == stage.pool]
        columns.append(1 + max((columns[j] for j in before), default=-1))
    return columns


def box_widths(rpeg: Rpeg, columns: list[int], channels: list[float]) -> list[float]:
    """Width of each column's boxes: names unbroken if there is room, and never narrower than their parts."""
    names = [[text_width(op, OP) for op in stage.ops] for stage in rpeg.stages]
    parts = [[text_width(part, OP) for op in stage.ops for part in _words(op)] for stage in rpeg.stages]
    wanted = [_column_width(columns, names, c) for c in range(len(channels))]
    least = [_column_width(columns, parts, c) for c in range(len(channels))]
    room = WIDTH - 2 * MARGIN - HEADER - sum(channels) - LEAST_CHANNEL
    share = (room - sum(least)) / max(sum(wanted) - sum(least), 1.0)
    widths = [a + (b - a) * min(max(share, 0.0), 1.0) for a, b in zip(least, wanted, strict=True)]
    spare = max(room - sum(widths), 0.0) / len(widths)
    return [min(width + spare, max(MOST_BOX, width)) for width in widths]


def _column_width(columns: list[int], texts: list[list[float]], column: int) -> float:
    widest = max(max(widths) for widths, c in zip(texts, columns, strict=True) if c == column)
    return max(widest + 2 * PAD + CHIP + 2.0, LEAST_BOX)


def place_boxes(rpeg: Rpeg, columns: list[int], channels: list[float], top: float) -> tuple[Box, ...]:
    """The boxes, centred in their lanes, of which the first starts at `top`. Every pool runs a stage."""
    widths = box_widths(rpeg, columns, channels)
    starts = _starts(widths, channels)
    lanes = [[pool.name for pool in rpeg.pools].index(stage.pool) for stage in rpeg.stages]
    lines = [_lines(stage, rpeg, widths[c] - 2 * PAD) for stage, c in zip(rpeg.stages, columns, strict=True)]
    heights = [sum(line.style.leading for line in block) + 2 * PAD - 2.0 for block in lines]
    highest = [max(h for h, at in zip(heights, lanes, strict=True) if at == lane) for lane in range(len(rpeg.pools))]
    tops = lane_tops(highest, top)
    middles = [(a + b) / 2 for a, b in pairwise(tops)]
    return tuple(
        Box(
            stage=stage,
            column=columns[i],
            lane=lanes[i],
            lines=lines[i],
            x=starts[columns[i]],
            y=middles[lanes[i]] - heights[i] / 2,
            width=widths[columns[i]],
            height=heights[i],
        )
        for i, stage in enumerate(rpeg.stages)
    )


def lane_tops(heights: list[float], top: float) -> list[float]:
    """Where lanes that hold boxes of these heights start, and where the last one ends."""
    tops = [top]
    for height in heights:
        tops.append(tops[-1] + max(height, 44.0) + 2 * LANE_PAD)
    return tops


def _starts(widths: list[float], channels: list[float]) -> list[float]:
    starts, x = [], MARGIN + HEADER
    for width, channel in zip(widths, channels, strict=True):
        starts.append(x + channel)
        x += channel + width
    return starts


def _lines(stage: Stage, rpeg: Rpeg, width: float) -> tuple[TextLine, ...]:
    """Operations, models, layout and the state that the stage keeps for itself."""
    lines: list[TextLine] = []
    for op in stage.ops:
        style = RIDER if op in stage.riders else OP
        parts = wrap(op, style, width - CHIP)
        lines.append(TextLine(text=parts[0], style=style, marked=True, role=role_of(op, rpeg), indent=CHIP))
        lines += [TextLine(text=part, style=style, indent=CHIP) for part in parts[1:]]
    models = [(short_model(role, rpeg), MODEL) for role in roles_of(stage, rpeg)]
    verified = Op.REWARD in stage.ops and Role.REWARD not in rpeg.job.models
    words = [*models, *([("verifier", MODEL)] if verified else []), (", ".join(layout_words(stage, rpeg)), LAYOUT)]
    words += [(text, KEPT) for text in _kept(stage, rpeg)]
    lines += [TextLine(text=part, style=style) for text, style in words for part in wrap(text, style, width)]
    return tuple(lines)


def _kept(stage: Stage, rpeg: Rpeg) -> list[str]:
    """State that goes from a stage to itself, a phrase for each model."""
    own = [edge for edge in rpeg.state if edge.source in stage.ops and edge.target in stage.ops]
    sources = list(dict.fromkeys(edge.source for edge in own))
    phrases = []
    for source in sources:
        whose = f"{ROLE_OF[source]} " if len(sources) > 1 else ""
        sizes = [f"{_KEPT[e.state]} {bytes_text(state_bytes(rpeg, e))}" for e in own if e.source is source]
        phrases.append(f"keeps {whose}{', '.join(sizes)}")
    return phrases


_KEPT = {
    State.ACTOR_WEIGHTS: "weights",
    State.CRITIC_WEIGHTS: "weights",
    State.ACTOR_OPTIMIZER: "optimizer",
    State.CRITIC_OPTIMIZER: "optimizer",
    State.EXPERIENCE: "experience",
}
