"""The wires of a drawing: data on tracks above the lanes, state on tracks below them.

A net joins a stage with everything that reads what it gives. It leaves its box on the
side of its band, runs along a track and comes down to each reader; a box that another
hides from the band is reached through the channel beside its column. So no wire and no
label can cross a box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ir.graph import Op, Rpeg, State
from ir.render_layout import LEAST_CHANNEL, MARGIN, WIRE_GAP, Box, Style, text_width
from ir.render_words import DATA_WORDS, STATE_WORDS, bound_text, bytes_text, state_text
from ir.sizes import edge_bytes, state_bytes, waiting_sequences

Point = tuple[float, float]

LABEL = Style(10.0)
TRACK = 22.0
"""From a track to the next, with room for a label."""
LABEL_GAP = 5.0
"""Between a label and what is beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """A stage and those that read something it gives, by their place in the step."""

    source: int
    targets: tuple[int, ...]
    label: str
    dashed: bool = False
    below: bool = False
    """On the side of state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A net drawn."""

    net: Net
    paths: tuple[tuple[Point, ...], ...]
    """From the source to each target, corners included."""
    label_at: Point
    """Left end of its label's baseline."""
    track: int
    """0 is next to the lanes."""


def nets_of(rpeg: Rpeg) -> tuple[Net, ...]:
    """The nets of a graph, those that stay near the lanes first. What stays within a stage has none."""
    nets = (*_data_nets(rpeg), *_state_nets(rpeg))
    return tuple(sorted(nets, key=lambda net: max(abs(target - net.source) for target in net.targets)))


def _data_nets(rpeg: Rpeg) -> list[Net]:
    index = {op: i for i, stage in enumerate(rpeg.stages) for op in stage.ops}
    found: dict[tuple[int, str, bool], list[int]] = {}
    for edge in rpeg.data:
        source, target = index[edge.source], index[edge.target]
        if source != target:
            label = f"{DATA_WORDS[edge.data]} {bytes_text(edge_bytes(rpeg, edge))}"
            found.setdefault((source, label, edge.streamed), []).append(target)
    nets = [
        Net(source=source, targets=tuple(sorted(set(targets))), label=label, dashed=streamed)
        for (source, label, streamed), targets in found.items()
    ]
    return [*nets, Net(source=index[Op.UPDATE_ACTOR], targets=(index[Op.SYNC_WEIGHTS],), label="new weights")]


def _state_nets(rpeg: Rpeg) -> list[Net]:
    index = {op: i for i, stage in enumerate(rpeg.stages) for op in stage.ops}
    nets = []
    for edge in rpeg.state:
        source, target = index[edge.source], index[edge.target]
        if source != target:
            waiting = edge.state is State.EXPERIENCE
            buffer = [f"up to {waiting_sequences(rpeg, edge):,} sequences"] if waiting else []
            size = state_text(edge, state_bytes(rpeg, edge))
            words = [bound_text(edge), *([edge.method] if edge.method else []), *buffer, size]
            label = f"{STATE_WORDS[edge.state]}: {', '.join(words)}"
            nets.append(Net(source=source, targets=(target,), label=label, below=True))
    return nets


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Where a net meets a box."""

    net: Net
    stage: int
    channel: int | None
    """The channel it takes (that left of the column of its number), None if it goes straight to its band."""

    @property
    def outward(self) -> bool:
        """Whether the net starts here."""
        return self.net.source == self.stage


def ends_of(nets: Sequence[Net], columns: Sequence[int], lanes: Sequence[int]) -> tuple[End, ...]:
    """Every end of every net. Straight ways are for the box of a column that is next to the band."""
    return tuple(
        End(net=net, stage=stage, channel=_channel(net, stage, columns, lanes))
        for net in nets
        for stage in (net.source, *net.targets)
    )


def _channel(net: Net, stage: int, columns: Sequence[int], lanes: Sequence[int]) -> int | None:
    here = [lanes[i] for i, column in enumerate(columns) if column == columns[stage]]
    if lanes[stage] == (max(here) if net.below else min(here)):
        return None
    return columns[stage] + (1 if net.source == stage else 0)


def channel_widths(ends: Sequence[End], columns: Sequence[int]) -> list[float]:
    """Room left of each column; the way out of the last one lies beyond it."""
    counts = [sum(end.channel == c for end in ends) for c in range(max(columns) + 2)]
    return [LEAST_CHANNEL + WIRE_GAP * max(count - 1, 0) for count in counts]


def route(nets: Sequence[Net], ends: Sequence[End], boxes: Sequence[Box], bands: tuple[float, float]) -> list[Wire]:
    """Wires between boxes; bands are where the lanes start and end."""
    ways = _ways(ends, boxes)
    wires: list[Wire] = []
    for below in (False, True):
        side = [net for net in nets if net.below is below]
        spans = [_span(net, ways, boxes) for net in side]
        tracks = _tracks(spans)
        for net, track, span in zip(side, tracks, spans, strict=True):
            y = bands[1] + (track + 0.6) * TRACK if below else bands[0] - (track + 0.6) * TRACK
            others = [(other, ways) for other, at in zip(side, tracks, strict=True) if at > track]
            x = _label_x(net, span, sorted(x for other, _ in others for x in _verticals(other, ways)))
            wires.append(
                Wire(
                    net=net,
                    paths=tuple(_path(ways[net, net.source], ways[net, target], y) for target in net.targets),
                    label_at=(x, y + LABEL.size + 2.0 if below else y - 4.0),
                    track=track,
                )
            )
    return wires


Ways = dict[tuple[Net, int], tuple[Point, ...]]
"""For an end, the points from the box to where it turns into the track: one, or two through a channel."""


def _ways(ends: Sequence[End], boxes: Sequence[Box]) -> Ways:
    ways: Ways = {}
    for stage, box in enumerate(boxes):
        for below in (False, True):
            straight = [e for e in ends if e.stage == stage and e.channel is None and e.net.below is below]
            ordered = [e for e in straight if not e.outward] + [e for e in reversed(straight) if e.outward]
            for i, end in enumerate(ordered):
                x = box.x + box.width * (i + 1) / (len(ordered) + 1)
                ways[end.net, stage] = ((x, box.bottom if below else box.y),)
    return ways | _channel_ways(ends, boxes)


def _channel_ways(ends: Sequence[End], boxes: Sequence[Box]) -> Ways:
    ways: Ways = {}
    for channel in sorted({end.channel for end in ends if end.channel is not None}):
        here = [end for end in ends if end.channel == channel]
        # Ways out of the column before lie left of those into the column behind.
        ordered = [e for e in reversed(here) if e.outward] + [e for e in here if not e.outward]
        left = max((boxes[e.stage].right for e in ordered if e.outward), default=0.0)
        right = min((boxes[e.stage].x for e in ordered if not e.outward), default=0.0)
        first = left + LEAST_CHANNEL / 2 if left else right - LEAST_CHANNEL / 2 - WIRE_GAP * (len(ordered) - 1)
        for i, end in enumerate(ordered):
            x = first + WIRE_GAP * i
            ways[end.net, end.stage] = (_port(end, here, boxes[end.stage]), (x, 0.0))
    return ways


def _port(end: End, here: Sequence[End], box: Box) -> Point:
    """Where a wire through a channel meets the side of its box: data above state, and so that wires do not cross."""
    mine = [e for e in here if e.stage == end.stage and e.outward is end.outward]
    data, state = [e for e in mine if not e.net.below], [e for e in mine if e.net.below]
    ordered = [*reversed(data), *state]
    y = box.y + box.height * (ordered.index(end) + 1) / (len(ordered) + 1)
    return (box.right if end.outward else box.x, y)


def _verticals(net: Net, ways: Ways) -> list[float]:
    return [ways[net, stage][-1][0] for stage in (net.source, *net.targets)]


def _span(net: Net, ways: Ways, boxes: Sequence[Box]) -> tuple[float, float]:
    """What a net takes of its track: its wire, and its label from the left end on."""
    xs, width = _verticals(net, ways), text_width(net.label, LABEL) + 2 * LABEL_GAP
    last = max(box.right for box in boxes) + LEAST_CHANNEL
    start = max(min(min(xs), last - width), MARGIN)
    return start, max(max(xs), start + width)


def _tracks(spans: Sequence[tuple[float, float]]) -> list[int]:
    """The nearest track that is free for each span in turn."""
    taken: list[list[tuple[float, float]]] = []
    tracks = []
    for start, end in spans:
        free = (i for i, others in enumerate(taken) if all(end + 4 < a or b + 4 < start for a, b in others))
        track = next(free, len(taken))
        if track == len(taken):
            taken.append([])
        taken[track].append((start, end))
        tracks.append(track)
    return tracks


def _label_x(net: Net, span: tuple[float, float], obstacles: Sequence[float]) -> float:
    """The first place on a net's track where no wire to a farther track would cross the label, else its start."""
    width = text_width(net.label, LABEL)
    starts = [span[0] + LABEL_GAP, *(x + LABEL_GAP for x in obstacles if x > span[0])]
    for start in starts:
        end = start + width
        if end <= span[1] and not any(start - 2 < x < end + 2 for x in obstacles):
            return start
    return starts[0]


def _path(source: tuple[Point, ...], target: tuple[Point, ...], y: float) -> tuple[Point, ...]:
    """From a box to the track at `y`, along it, and to the other box."""
    leave, arrive = source[-1][0], target[-1][0]
    way_out = [source[0]] + ([(leave, source[0][1])] if len(source) > 1 else [])
    way_in = ([(arrive, target[0][1])] if len(target) > 1 else []) + [target[0]]
    return (*way_out, (leave, y), (arrive, y), *way_in)
