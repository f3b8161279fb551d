"""The graph as a drawing: a self-contained SVG without script, fonts or pictures from elsewhere.

Pools are lanes and time runs to the right. Data runs above the lanes, state that crosses
steps below them. A model's role has one hue, its name beside it, so that the drawing can
be read in grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

from ir.graph import PoolSpan, Rpeg, Stage
from ir.job import Role
from ir.render_layout import HEADER, LANE_PAD, MARGIN, PAD, WIDTH, Box, Style, clip, columns_of, place_boxes, text_width
from ir.render_wires import LABEL, TRACK, Point, Wire, channel_widths, ends_of, nets_of, route
from ir.render_words import job_text, model_text, roles_of

FILL = {
    Role.ACTOR: "#dbe8f8",
    Role.CRITIC: "#fde3c8",
    Role.REFERENCE: "#dff0dc",
    Role.REWARD: "#f3dcec",
    Role.TEACHER: "#f8f0c0",
}
MARK = {
    Role.ACTOR: "#2f6db5",
    Role.CRITIC: "#d9822b",
    Role.REFERENCE: "#4a8f43",
    Role.REWARD: "#a3478a",
    Role.TEACHER: "#b29a12",
}
PLAIN_FILL, PLAIN_MARK = "#ffffff", "#9aa5b1"
DATA_INK, STATE_INK = "#3a4a5a", "#a3541a"

TITLE, SUBTITLE, NOTE = Style(16.0, bold=True), Style(11.0), Style(10.0, ink="#46525e")
POOL = Style(12.0, bold=True)
NOTES = (
    "Stages of a lane take turns; those of one column may run at the same time. Operations in grey are done on the way "
    "of another, without a pass of their own.",
    "Above the lanes: data of the step, as whole batches (solid) or streamed group by group (dashed). Below: state "
    "that later steps read; k = most updates it may be behind.",
)
CORNER = 7.0
"""Radius of a wire's turns."""


def svg(rpeg: Rpeg, *, title: str = "") -> str:
    """The graph as SVG text; the job's name is its title unless one is given."""
    columns = columns_of(rpeg)
    lanes = [[pool.name for pool in rpeg.pools].index(stage.pool) for stage in rpeg.stages]
    nets = nets_of(rpeg)
    ends = ends_of(nets, columns, lanes)
    channels = channel_widths(ends, columns)
    # How many tracks there are depends on where boxes are from left to right, but not on their height.
    trial = place_boxes(rpeg, columns, channels[:-1], 0.0)
    above = _band([w for w in route(nets, ends, trial, (0.0, 0.0)) if not w.net.below])
    top = 62.0 + above
    boxes = place_boxes(rpeg, columns, channels[:-1], top)
    bottom = _lane_edges(rpeg, boxes, top)[-1]
    wires = route(nets, ends, boxes, (top, bottom))
    legend_top = bottom + _band([w for w in wires if w.net.below]) + 10.0
    width = max(WIDTH, max(box.right for box in boxes) + channels[-1] + MARGIN)
    parts = [
        *_heading(rpeg, title, width),
        *_lanes(rpeg, boxes, top, width),
        *_wires(wires),
        *(line for box in boxes for line in _box(box, rpeg)),
        *_labels(wires),
        *_legend(rpeg, legend_top),
    ]
    height = legend_top + 18.0 * (len(rpeg.job.models) + len(NOTES)) + 8.0
    return "\n".join([_opening(width, height), *parts, "</svg>"]) + "\n"


def _band(wires: Sequence[Wire]) -> float:
    return (max((wire.track for wire in wires), default=-1) + 1.4) * TRACK


def _opening(width: float, height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="Helvetica, Arial, \'DejaVu Sans\', sans-serif">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>'
    )


def _text(x: float, y: float, text: str, style: Style) -> str:
    weight = ' font-weight="bold"' if style.bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{style.size}" fill="{style.ink}"{weight}>{escape(text)}</text>'


def _heading(rpeg: Rpeg, title: str, width: float) -> list[str]:
    room = width - 2 * MARGIN
    return [
        _text(MARGIN, 26.0, clip(title or rpeg.job.document.name, TITLE, room), TITLE),
        _text(MARGIN, 44.0, clip(job_text(rpeg), SUBTITLE, room), SUBTITLE),
    ]


# Lanes and boxes


def _lane_edges(rpeg: Rpeg, boxes: Sequence[Box], top: float) -> list[float]:
    edges = [top]
    for lane in range(len(rpeg.pools)):
        edges.append(edges[-1] + max(max(b.height for b in boxes if b.lane == lane), 44.0) + 2 * LANE_PAD)
    return edges


def _lanes(rpeg: Rpeg, boxes: Sequence[Box], top: float, width: float) -> list[str]:
    edges = _lane_edges(rpeg, boxes, top)
    return [line for i, pool in enumerate(rpeg.pools) for line in _lane(pool, rpeg, edges[i : i + 2], width)]


def _lane(pool: PoolSpan, rpeg: Rpeg, edges: Sequence[float], width: float) -> list[str]:
    middle = (edges[0] + edges[1]) / 2
    last = pool.first_device + pool.devices - 1
    numbers = f"{pool.first_device}-{last}" if pool.devices > 1 else str(last)
    group = [f"group {pool.group}"] if any(other.group for other in rpeg.pools) else []
    notes = [f"{pool.devices:,} device{'' if pool.devices == 1 else 's'}", f"no. {numbers}", *group]
    room = HEADER - 2 * PAD
    return [
        f'<rect class="lane" x="{MARGIN:.1f}" y="{edges[0] + 2:.1f}" width="{width - 2 * MARGIN:.1f}" '
        f'height="{edges[1] - edges[0] - 4:.1f}" rx="6" fill="#f4f6f8" stroke="#d5dbe1"/>',
        f"<g><title>{escape(pool.name)}</title>",
        _text(MARGIN + PAD, middle - 8.0, clip(pool.name, POOL, room), POOL),
        *(_text(MARGIN + PAD, middle + 8.0 + 13.0 * i, clip(n, NOTE, room), NOTE) for i, n in enumerate(notes)),
        "</g>",
    ]


def _box(box: Box, rpeg: Rpeg) -> list[str]:
    role = _main_role(box.stage, rpeg)
    fill, ink = (FILL[role], MARK[role]) if role else (PLAIN_FILL, PLAIN_MARK)
    lines = [
        f"<g data-stage={quoteattr(box.stage.name)}><title>{escape(box.stage.name)}</title>",
        f'<rect class="stage" x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" '
        f'rx="4" fill="{fill}" stroke="{ink}" stroke-width="1.2"/>',
    ]
    y = box.y + PAD - 4.0
    for line in box.lines:
        y += line.style.leading
        if line.marked:
            lines.append(_chip(box.x + PAD, y - 8.0, line.role))
        lines.append(_text(box.x + PAD + line.indent, y, line.text, line.style))
    return [*lines, "</g>"]


def _chip(x: float, y: float, role: Role | None) -> str:
    ink = MARK[role] if role else PLAIN_MARK
    return f'<rect class="chip" x="{x:.1f}" y="{y:.1f}" width="8" height="8" rx="2" fill="{ink}"/>'


def _main_role(stage: Stage, rpeg: Rpeg) -> Role | None:
    """The model of the stage's own pass, not of what is done on its way."""
    own = Stage(ops=tuple(op for op in stage.ops if op not in stage.riders))
    return next(iter(roles_of(own, rpeg)), None)


# Wires


def _wires(wires: Sequence[Wire]) -> list[str]:
    """Each on a white casing, so that crossings do not look like forks."""
    lines = []
    for wire in sorted(wires, key=lambda w: -w.track):
        ink, path = (STATE_INK if wire.net.below else DATA_INK), "".join(_curve(points) for points in wire.paths)
        dash = ' stroke-dasharray="5 3"' if wire.net.dashed else ""
        style = f'fill="none" stroke="{ink}" stroke-width="1.3"{dash}'
        lines.append(f'<path d="{path}" fill="none" stroke="#ffffff" stroke-width="4"/>')
        lines.append(f'<path class="{"state" if wire.net.below else "data"}" d="{path}" {style}/>')
        lines += [_arrow(points, ink) for points in wire.paths]
    return lines


def _curve(points: Sequence[Point]) -> str:
    """A line through the points with rounded corners."""
    parts = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        a, b = _towards(corner, before), _towards(corner, after)
        parts.append(f"L{a[0]:.1f} {a[1]:.1f}Q{corner[0]:.1f} {corner[1]:.1f} {b[0]:.1f} {b[1]:.1f}")
    return "".join([*parts, f"L{points[-1][0]:.1f} {points[-1][1]:.1f}"])


def _towards(corner: Point, other: Point) -> Point:
    """The point where a turn at the corner starts or ends."""
    dx, dy = other[0] - corner[0], other[1] - corner[1]
    length = max(abs(dx) + abs(dy), 1e-6)
    reach = min(CORNER, length / 2) / length
    return corner[0] + dx * reach, corner[1] + dy * reach


def _arrow(points: Sequence[Point], ink: str) -> str:
    (bx, by), (x, y) = points[-2:]
    dx, dy = _sign(x - bx), _sign(y - by)
    corners = ((x, y), (x - 7 * dx - 3.2 * dy, y - 7 * dy - 3.2 * dx), (x - 7 * dx + 3.2 * dy, y - 7 * dy + 3.2 * dx))
    return f'<polygon points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in corners)}" fill="{ink}"/>'


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _labels(wires: Sequence[Wire]) -> list[str]:
    lines = []
    for wire in wires:
        x, y = wire.label_at
        ink, width = (STATE_INK if wire.net.below else DATA_INK), text_width(wire.net.label, LABEL)
        size = f'width="{width + 2:.1f}" height="11.5"'
        lines.append(f'<rect class="label" x="{x - 1:.1f}" y="{y - 9:.1f}" {size} fill="#ffffff"/>')
        lines.append(_text(x, y, wire.net.label, Style(LABEL.size, ink=ink)))
    return lines


def _legend(rpeg: Rpeg, top: float) -> list[str]:
    """The models by their hue, and what lines mean."""
    lines, y = [], top
    for role in rpeg.job.models:
        host = rpeg.weights_of(role)
        text = model_text(role, rpeg) if host is role else f"on the weights of the {host}"
        y += 18.0
        lines += [_chip(MARGIN, y - 8.0, role), _text(MARGIN + 14.0, y, f"{role}: {text}", NOTE)]
    return [*lines, *(_text(MARGIN, y + 18.0 * (i + 1), note, NOTE) for i, note in enumerate(NOTES))]
