"""Drawings, trees and Mermaid of the graph, and the sizes of what travels in it."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import build
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.graph import Data, DataEdge, Op, PoolSpan, Rpeg, Stage, State, StateEdge
from ir.job import Algorithm, Job, JobDocument, Lengths, Models, ModelSource, Workload, resolve
from ir.lower import lower
from ir.plan import Fusions, Generate, Pass, Plan, Pool, Sharing, Update
from ir.recipes import RECIPES
from ir.render import mermaid, svg, tree_text
from ir.render_layout import OP, columns_of, text_width, wrap
from ir.render_words import bytes_text, count_text, parameters_text
from ir.setting import Devices, Setting
from ir.sizes import edge_bytes, edge_values, sequence_tokens, state_bytes, waiting_sequences
from ir.workload import Turns
from space.build import default_space
from space.enumerate import LegalSpace, legal_space

SMALL = ModelSource(name="Qwen/Qwen3-0.6B")
MIXTURE = ModelSource(name="Qwen/Qwen3-30B-A3B")
KNOWN_LENGTHS = Lengths(prompt=(100.0, 100.0), response=(0.1, 1999.9))


def job(algorithm: str, *, actor: ModelSource = SMALL, lengths: Lengths | None = KNOWN_LENGTHS, **workload: Any) -> Job:
    """64 prompts x 8 samples of 100 + 1,000 tokens; PPO has a reward model of its own."""
    ppo, penalty = algorithm == "ppo", algorithm not in ("dapo", "distillation")
    document = JobDocument(
        name="nightly",
        algorithm=Algorithm(name=algorithm, learning_rate=1e-6, kl_coefficient=0.01 if penalty else 0.0),
        models=Models(
            actor=actor,
            critic=SMALL if ppo else None,
            reward=SMALL if ppo else None,
            teacher=MIXTURE if algorithm == "distillation" else None,
        ),
        workload=Workload(
            prompts_per_step=64,
            samples_per_prompt=8,
            max_prompt_tokens=512,
            max_response_tokens=4096,
            useful_groups=0.5 if algorithm == "dapo" else None,
            lengths=lengths,
            **workload,
        ),
    )
    return resolve(document, Path("."), where="job.toml")


JOBS = {
    **{name: job(name) for name in ("grpo", "ppo", "dapo", "remax", "distillation")},
    "multi-turn": job("grpo", turns=Turns(mean=3.0)),
    "mixture": job("grpo", actor=MIXTURE, lengths=None),
}

PPO_PLAN = Plan(
    pools=(Pool(name="rollout", devices=16), Pool(name="train", devices=8), Pool(name="judges", devices=4, group=1)),
    generate=Generate(pool="rollout", tp=2, concurrency=64, memory_percent=80, precision="fp8", draft_tokens=4),
    reward=Pass(pool="judges", micro_batch=16),
    reference_logprob=Pass(pool="judges", tp=2, micro_batch=8),
    old_logprob=Pass(pool="train", micro_tokens=16384),
    values=Pass(pool="train", micro_batch=8, zero=3),
    update_critic=Update(pool="train", dp=8, micro_batch=4, zero=2, shard=4),
    update_actor=Update(pool="train", dp=2, tp=2, pp=2, vpp=2, micro_batch=4, recompute="full", offload="optimizer"),
    fusions=Fusions(stream=True),
    staleness=2,
    in_flight=True,
    sync="broadcast",
)


@cache
def space_of(name: str) -> LegalSpace:
    setting = Setting(
        job=JOBS[name], groups=(Devices(count=8, domain=4, fp8=True, host=True), Devices(count=4, domain=4))
    )
    return legal_space(default_space(setting), setting)


def any_plan(name: str, rng: random.Random) -> Rpeg:
    """A legal plan: any structure, any sizes of its pools, any layouts."""
    space = space_of(name)
    cases, case_of = space.cases
    sizes: list[tuple[int, ...]] = []
    while not sizes:
        structure = rng.randrange(space.num_structures)
        sizes = list(space.pool_sizes(cases[int(case_of[structure])]))
    factor = space.factor(structure, rng.choice(sizes))
    counts = {op: (last - first) * factor.tables[op].num_free for op, (first, last) in factor.spans.items()}
    batch = factor.combine({op: np.array([rng.randrange(count)]) for op, count in counts.items()}, 1)
    return lower(JOBS[name], batch.plan(0))


# Tree


def test_tree_of_a_small_plan() -> None:
    assert tree_text(lower(build.job(), build.plan(stream=True, staleness=1, fold_old_logprob=True))).splitlines() == [
        "test: grpo, 4 prompts x 4 samples = 16 sequences a step, 14.5 + 11 tokens (prompt + response on average)",
        "├─ models",
        "│  ├─ actor: config.json, 2 layers x 32, 20.7 k parameters",
        "│  ├─ reference: config.json, 2 layers x 32, 20.7 k parameters",
        "│  └─ reward: a verifier, no model",
        "├─ pools",
        "│  ├─ rollout: device 0 (1 in all)",
        "│  │  └─ generate: actor 20.7 k (2 x 32); 1 engine, 8 sequences each",
        "│  └─ train: device 1 (1 in all)",
        "│     ├─ reward: verifier; 1 device",
        "│     ├─ reference_logprob: reference 20.7 k (2 x 32); 1 replica, micro-batch 4",
        "│     ├─ advantage: 1 device",
        "│     ├─ (old_logprob) + update_actor: actor 20.7 k (2 x 32); 1 replica, micro-batch 4",
        "│     └─ sync_weights: 1 device",
        "├─ data within a step",
        "│  ├─ generate -> reward: tokens, 408 x 4 bytes a token = 1.63 kB, streamed",
        "│  ├─ generate -> reference_logprob: tokens, 408 x 4 bytes a token = 1.63 kB, streamed",
        "│  ├─ generate -> update_actor: tokens, 408 x 4 bytes a token = 1.63 kB",
        "│  ├─ reward -> advantage: rewards, 16 x 4 bytes a sequence = 64 B",
        "│  ├─ advantage -> update_actor: advantages, 176 x 4 bytes a token = 704 B",
        "│  ├─ generate -> update_actor: rollout log-probs, 176 x 4 bytes a token = 704 B",
        "│  └─ reference_logprob -> update_actor: reference log-probs, 176 x 4 bytes a token = 704 B",
        "└─ state between steps",
        "   ├─ sync_weights -> generate: actor weights, k = 1, in flight, broadcast, 41.3 kB",
        "   ├─ update_actor -> update_actor: actor weights, k = 0, 41.3 kB",
        "   ├─ update_actor -> update_actor: actor optimizer, k = 0, 248 kB",
        "   └─ generate -> update_actor: experience, k = 1, in flight, up to 32 sequences, 4.67 kB",
    ]


PPO_LINES = [
    "nightly: ppo, 64 prompts x 8 samples = 512 sequences a step, 100 + 1,000 tokens (prompt + response on average)",
    "│  ├─ critic: Qwen/Qwen3-0.6B, 28 layers x 1,024, 596 M parameters",
    "│  ├─ rollout: devices 0-15 of group 0 (16 in all)",
    "│  │  └─ generate: actor 596 M (28 x 1,024); 8 engines of tp 2, 64 sequences each, 80% of memory, "
    "4 tokens guessed, fp8",
    "│  ├─ train: devices 16-23 of group 0 (8 in all)",
    "│  │  ├─ old_logprob: actor 596 M (28 x 1,024); 8 replicas, micro-batch 16,384 tokens",
    "│  │  ├─ values: critic 596 M (28 x 1,024); 8 replicas, micro-batch 8, zero 3",
    "│  │  ├─ update_critic: critic 596 M (28 x 1,024); 8 replicas, micro-batch 4, zero 2 over 4",
    "│  │  ├─ update_actor: actor 596 M (28 x 1,024); 2 replicas of tp 2 x pp 2, micro-batch 4, vpp 2, recompute full, "
    "offload optimizer",
    "│  └─ judges: devices 0-3 of group 1 (4 in all)",
    "│     ├─ reward: reward 596 M (28 x 1,024); 4 replicas, micro-batch 16",
    "│     └─ reference_logprob: reference 596 M (28 x 1,024); 2 replicas of tp 2, micro-batch 8",
    "│  ├─ generate -> values: tokens, 563,200 x 4 bytes a token = 2.25 MB, streamed",
    "│  ├─ reward -> advantage: rewards, 512 x 4 bytes a sequence = 2.05 kB",
    "│  ├─ advantage -> update_critic: returns, 512,000 x 4 bytes a token = 2.05 MB",
    "   ├─ sync_weights -> generate: actor weights, k = 2, in flight, broadcast, 596 MB",
    "   ├─ update_critic -> values: critic weights, k = 0, 1.19 GB",
    "   ├─ update_critic -> update_critic: critic optimizer, k = 0, 7.15 GB",
    "   └─ generate -> update_actor: experience, k = 2, in flight, up to 1,536 sequences, 12.9 MB",
]


def test_tree_of_a_plan_with_a_critic() -> None:
    lines = tree_text(lower(JOBS["ppo"], PPO_PLAN)).splitlines()
    assert [line for line in PPO_LINES if line not in lines] == []
    assert len(lines) == 1 + 4 + 4 + 3 + 9 + 16 + 8


def test_tree_says_that_only_changes_are_sent() -> None:
    plan = msgspec.structs.replace(PPO_PLAN, sync="delta")
    line = "   ├─ sync_weights -> generate: actor weights, k = 2, in flight, delta, changes of 596 MB"
    assert line in tree_text(lower(JOBS["ppo"], plan)).splitlines()


def test_tree_says_what_is_shared_and_what_stays_in_a_stage() -> None:
    plan = Plan(
        pools=(Pool(name="all", devices=8),),
        generate=Generate(pool="all", concurrency=64),
        reward=Pass(pool="all", micro_batch=16),
        reference_logprob=Pass(pool="all", micro_batch=16),
        old_logprob=Pass(pool="all", micro_batch=16),
        update_actor=Update(pool="all", dp=8, micro_batch=4),
        sharing=Sharing(critic_trunk=True, reference_adapter=True),
    )
    text = tree_text(lower(JOBS["ppo"], plan))
    assert "critic: no weights of its own: a head on the actor's trunk" in text
    assert "reference: no weights of its own: the actor's weights, adapter off" in text
    assert "old_logprob + (values): actor 596 M (28 x 1,024) and critic on the actor's trunk; 8 replicas" in text
    early = lower(build.job(), build.plan(reward_with_generation=True))
    assert "generate -> reward: tokens, 408 x 4 bytes a token = 1.63 kB, within the stage" in tree_text(early)


def test_unknown_lengths_are_said_to_be_the_longest() -> None:
    first = tree_text(any_plan("mixture", random.Random(0))).splitlines()[:3]
    assert first[0].endswith("512 + 4,096 tokens (at most, for the lengths are unknown)")
    assert first[2].endswith("actor: Qwen/Qwen3-30B-A3B, 48 layers x 2,048, 30.5 B parameters, 3.04 B active")


# Sizes


def edge(source: Op, target: Op, data: Data) -> DataEdge:
    return DataEdge(source=source, target=target, data=data)


@pytest.mark.parametrize(
    ("name", "wanted", "values", "size"),
    [
        ("grpo", edge(Op.GENERATE, Op.REWARD, Data.TOKENS), 512 * 1100, 4 * 512 * 1100),
        ("grpo", edge(Op.OLD_LOGPROB, Op.UPDATE_ACTOR, Data.OLD_LOGPROB), 512 * 1000, 4 * 512 * 1000),
        ("grpo", edge(Op.REWARD, Op.ADVANTAGE, Data.REWARD), 512, 2048),
        ("ppo", edge(Op.VALUES, Op.ADVANTAGE, Data.VALUES), 512 * 1000, 4 * 512 * 1000),
        # Half of the groups are dropped, after they were scored.
        ("dapo", edge(Op.GENERATE, Op.REWARD, Data.TOKENS), 1024 * 1100, 4 * 1024 * 1100),
        ("dapo", edge(Op.REWARD, Op.SELECT, Data.REWARD), 1024, 4096),
        ("dapo", edge(Op.SELECT, Op.UPDATE_ACTOR, Data.TOKENS), 512 * 1100, 4 * 512 * 1100),
        # A greedy response a prompt, whose rewards go with the others.
        ("remax", edge(Op.GREEDY, Op.REWARD, Data.GREEDY_TOKENS), 64 * 1100, 4 * 64 * 1100),
        ("remax", edge(Op.REWARD, Op.ADVANTAGE, Data.REWARD), 576, 2304),
        ("mixture", edge(Op.GENERATE, Op.REWARD, Data.TOKENS), 512 * 4608, 4 * 512 * 4608),
    ],
)
def test_data_by_hand(name: str, wanted: DataEdge, values: int, size: int) -> None:
    rpeg = RECIPES[JOBS[name].algorithm.name](JOBS[name])
    assert wanted in rpeg.data
    assert (edge_values(rpeg, wanted), edge_bytes(rpeg, wanted)) == (pytest.approx(values), pytest.approx(size))


def test_state_by_hand() -> None:
    rpeg = lower(JOBS["ppo"], PPO_PLAN)
    sizes = {(e.source, e.target, e.state): state_bytes(rpeg, e) for e in rpeg.state}
    parameters = 596_049_920
    assert sizes[Op.SYNC_WEIGHTS, Op.GENERATE, State.ACTOR_WEIGHTS] == parameters
    assert sizes[Op.UPDATE_ACTOR, Op.OLD_LOGPROB, State.ACTOR_WEIGHTS] == 2 * parameters
    assert sizes[Op.UPDATE_CRITIC, Op.UPDATE_CRITIC, State.CRITIC_OPTIMIZER] == 12 * (parameters + 1024)
    assert sizes[Op.GENERATE, Op.UPDATE_ACTOR, State.EXPERIENCE] == pytest.approx(3 * 512 * 4 * (1100 + 1000))
    assert [waiting_sequences(rpeg, e) for e in rpeg.state if e.state is State.EXPERIENCE] == [1536]


def test_of_adapters_only_they_travel() -> None:
    adapted = job("grpo", actor=ModelSource(name="Qwen/Qwen3-0.6B", lora_rank=16))
    rpeg = RECIPES["grpo"](adapted)
    weights = StateEdge(source=Op.SYNC_WEIGHTS, target=Op.GENERATE, state=State.ACTOR_WEIGHTS)
    # 28 layers; input + output widths: query and output 1024 + 2048, key and value 1024 + 1024, three of 1024 + 3072.
    assert state_bytes(rpeg, weights) == 2 * 16 * 28 * (2 * 3072 + 2 * 2048 + 3 * 4096)


def test_mean_of_uneven_quantiles() -> None:
    lengths = Lengths(prompt=(10.0, 20.0, 100.0), response=(1.0, 1.0, 41.0), probabilities=(0.0, 0.75, 1.0))
    tokens = sequence_tokens(job("grpo", lengths=lengths))
    assert (tokens.prompt, tokens.response, tokens.total, tokens.known) == (26.25, 6.0, 32.25, True)


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (bytes_text, 0, "0 B"),
        (bytes_text, 999, "999 B"),
        (bytes_text, 1234, "1.23 kB"),
        (bytes_text, 999_600, "1 MB"),
        (bytes_text, 16_381_470_720, "16.4 GB"),
        (parameters_text, 8_190_735_360, "8.19 B"),
        (parameters_text, 671_026_419_200, "671 B"),
        (parameters_text, 512, "512"),
        (count_text, 999_999, "999,999"),
        (count_text, 999_999.5, "1 M"),
        (count_text, 2_621_440, "2.62 M"),
    ],
)
def test_numbers_for_readers(function: Any, value: float, text: str) -> None:
    assert function(value) == text


# Drawing

Rect = tuple[float, float, float, float]
"""Left, top, right, bottom."""

SVG = "{http://www.w3.org/2000/svg}"


def rects(root: ElementTree.Element, kind: str) -> list[Rect]:
    found = [item for item in root.iter(f"{SVG}rect") if item.get("class") == kind]
    sizes = [[float(item.get(key, "nan")) for key in ("x", "y", "width", "height")] for item in found]
    return [(x, y, x + w, y + h) for x, y, w, h in sizes]


def overlap(a: Rect, b: Rect) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def inside(a: Rect, b: Rect) -> bool:
    return b[0] <= a[0] and b[1] <= a[1] and a[2] <= b[2] and a[3] <= b[3]


def segments(root: ElementTree.Element) -> Iterator[Rect]:
    """The straight pieces of all wires, corners taken sharp, as rectangles without width."""
    for path in root.iter(f"{SVG}path"):
        for piece in str(path.get("d")).split("M")[1:]:
            numbers = [float(number) for number in re.findall(r"-?[\d.]+", piece)]
            points = list(zip(numbers[::2], numbers[1::2], strict=True))
            for (x, y), (u, v) in pairwise(points):
                yield min(x, u), min(y, v), max(x, u), max(y, v)


def texts(item: ElementTree.Element) -> list[tuple[float, float, str]]:
    found = item.iter(f"{SVG}text")
    return [(float(t.get("x", "nan")), float(t.get("font-size", "nan")), str(t.text)) for t in found]


def check_drawing(rpeg: Rpeg) -> None:
    drawn = svg(rpeg)
    root = ElementTree.fromstring(drawn)
    assert svg(rpeg) == drawn
    boxes, labels, lanes = rects(root, "stage"), rects(root, "label"), rects(root, "lane")
    assert (len(boxes), len(lanes)) == (len(rpeg.stages), len(rpeg.pools))
    titles = {str(title.text) for title in root.iter(f"{SVG}title")}
    assert titles == {stage.name for stage in rpeg.stages} | {pool.name for pool in rpeg.pools}
    crossing = [e for e in rpeg.state if rpeg.stage(e.source) is not rpeg.stage(e.target)]
    shown = " ".join(text for _, _, text in texts(root))
    assert shown.count("k = ") == len(crossing) + 1  # and the legend
    assert all(f"k = {e.staleness}{', in flight' if e.in_flight else ''}, " in shown for e in crossing)
    canvas = (0.0, 0.0, float(root.get("width", "nan")), float(root.get("height", "nan")))
    assert all(inside(rect, canvas) for rect in (*lanes, *labels, *segments(root)))
    assert all(sum(inside(box, lane) for lane in lanes) == 1 for box in boxes)
    assert not any(overlap(a, b) for a, b in combinations(boxes, 2))
    assert not any(overlap(a, b) for a, b in combinations(labels, 2))
    assert not any(overlap(label, lane) for label in labels for lane in lanes)
    inner = [(x + 0.2, y + 0.2, u - 0.2, v - 0.2) for x, y, u, v in boxes]
    assert not any(overlap(piece, box) for piece in segments(root) for box in inner)
    check_texts(root)


def check_texts(root: ElementTree.Element) -> None:
    """What is written in a box fits it, and says each of the stage's operations."""
    for group in root.iter(f"{SVG}g"):
        if (name := group.get("data-stage")) is not None:
            (box,) = rects(group, "stage")
            lines = texts(group)
            assert all(x + text_width(text, replace(OP, size=size, bold=False)) <= box[2] for x, size, text in lines)
            written = "".join(text for _, _, text in lines)
            assert all(op in written for op in name.split("+"))


def check_mermaid(rpeg: Rpeg) -> None:
    lines = [line.strip() for line in mermaid(rpeg).splitlines()]
    assert lines[0] == "flowchart LR"
    assert sum(line.startswith("subgraph ") for line in lines) == lines.count("end") == len(rpeg.pools)
    nodes = [line.partition("[")[0] for line in lines if line.endswith("]") and not line.startswith("subgraph ")]
    assert nodes == [
        stage.name.replace("+", "__") for pool in rpeg.pools for stage in rpeg.stages if stage.pool == pool.name
    ]
    solid = [re.fullmatch(r'(\w+) -->\|"[^"]+"\| (\w+)', line) for line in lines if " -->|" in line]
    dotted = [re.fullmatch(r'(\w+) -\.->\|"[^"]+"\| (\w+)', line) for line in lines if " -.->|" in line]
    # One more: the new weights, from the update to their way back.
    assert (len(solid), len(dotted)) == (len(rpeg.data) + 1, len(rpeg.state))
    assert all(match is not None and {*match.groups()} <= set(nodes) for match in solid + dotted)


@given(name=st.sampled_from(sorted(JOBS)), rng=st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_any_legal_plan_is_shown_in_full(name: str, rng: random.Random) -> None:
    rpeg = any_plan(name, rng)
    check_drawing(rpeg)
    check_mermaid(rpeg)
    tree = tree_text(rpeg)
    assert all(f"─ {e.source} -> {e.target}: " in tree for e in (*rpeg.data, *rpeg.state))
    assert tree.count("streamed") == sum(e.streamed for e in rpeg.data)


def test_thirteen_stages_in_five_lanes_fit_a_screen() -> None:
    """No recipe has them all; a drawing must stand what is still to come."""
    lanes = {Op.GENERATE: 0, Op.GREEDY: 0, Op.ENVIRONMENT: 0, Op.REWARD: 4, Op.SELECT: 4, Op.VALUES: 2}
    lanes |= {Op.REFERENCE_LOGPROB: 3, Op.TEACHER_LOGPROB: 3, Op.UPDATE_CRITIC: 2}
    base = lower(JOBS["ppo"], PPO_PLAN)
    rpeg = replace(
        base,
        pools=tuple(PoolSpan(name=f"pool{i}", first_device=8 * i, devices=8) for i in range(5)),
        stages=tuple(Stage(ops=(op,), pool=f"pool{lanes.get(op, 1)}") for op in Op),
        data=(*base.data, edge(Op.GREEDY, Op.REWARD, Data.GREEDY_TOKENS), edge(Op.REWARD, Op.SELECT, Data.REWARD)),
    )
    check_drawing(rpeg)
    assert ElementTree.fromstring(svg(rpeg)).get("width") == "1200"


def test_stages_that_may_run_together_share_a_column() -> None:
    rpeg = lower(JOBS["ppo"], PPO_PLAN)
    columns = dict(zip((stage.name for stage in rpeg.stages), columns_of(rpeg), strict=True))
    assert columns == {
        "generate": 0,
        "reward": 1,
        "reference_logprob": 2,
        "old_logprob": 1,
        "values": 2,
        "advantage": 3,
        "update_critic": 4,
        "update_actor": 5,
        "sync_weights": 6,
    }


def test_streamed_data_is_dashed_and_state_is_not_data() -> None:
    plain, streaming = (svg(lower(build.job(), build.plan(stream=stream))) for stream in (False, True))
    assert (plain.count("stroke-dasharray"), streaming.count("stroke-dasharray")) == (0, 1)
    # Rewards, advantages, reference, old and rollout log-probs, tokens, new weights; streamed tokens apart.
    assert (plain.count('class="data"'), streaming.count('class="data"')) == (7, 8)
    # Weights to the rollout and to the old log-probs, and the experience; the rest stays in its stage.
    assert plain.count('class="state"') == 3
    written = " ".join(text for _, _, text in texts(ElementTree.fromstring(plain)))
    assert "keeps weights 41.3 kB, optimizer 248 kB" in written


def test_a_title_is_escaped_and_cut_to_fit() -> None:
    rpeg = lower(build.job(), build.plan())
    written = [str(t.text) for t in ElementTree.fromstring(svg(rpeg, title="a <b> & c")).iter(f"{SVG}text")]
    assert written[0] == "a <b> & c"
    long = [str(t.text) for t in ElementTree.fromstring(svg(rpeg, title="x" * 500)).iter(f"{SVG}text")]
    assert long[0].endswith("x…") and len(long[0]) < 120
    assert ElementTree.fromstring(svg(rpeg)).findtext(f"{SVG}text") == "test"


def test_a_pool_of_any_name_is_shown() -> None:
    plan = build.plan()
    base = lower(build.job(), plan)
    named = replace(
        base,
        pools=tuple(replace(pool, name='end "<&' if pool.name == "train" else pool.name) for pool in base.pools),
        stages=tuple(replace(s, pool='end "<&' if s.pool == "train" else s.pool) for s in base.stages),
    )
    check_drawing(named)
    check_mermaid(named)
    assert 'subgraph pool1["end #quot;<&: device 1"]' in mermaid(named)


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("old_logprob", 200.0, ["old_logprob"]),
        ("old_logprob", 70.0, ["old_", "logprob"]),
        ("8 replicas of tp 4", 110.0, ["8 replicas of", "tp 4"]),
        ("incomprehensibility", 60.0, ["incomp…"]),
    ],
)
def test_wrapping(text: str, width: float, lines: list[str]) -> None:
    assert wrap(text, OP, width) == lines
