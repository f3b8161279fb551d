"""Training steps and peak memory against published measurements, by file and as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import memory_rows
from accuracy import Evaluation, find
from training_files import automodel, bridge, dgxc, megatron, megatron_moe, nemo, vtrain
from training_rows import Record, Row, evaluation, parse, read
from training_sharded import llama3, mpt, prime, titan

Reader = Callable[[Record], Row | str]

DENSE: Mapping[str, Reader] = {
    "training_megatron": megatron,
    "training_megatron_bridge": bridge,
    "training_dgxc": dgxc,
    "training_mosaic_mpt": mpt,
    "training_torchtitan": titan,
    "training_prime_rl": prime,
    "training_nemo_24": nemo,
    "training_llama3": llama3,
    "training_automodel": automodel,
}
"""Files with rows of dense models."""

MOE: Mapping[str, Reader] = {
    "training_megatron_bridge": bridge,
    "training_megatron_moe": megatron_moe,
    "training_automodel": automodel,
    "training_dgxc": dgxc,
    "training_prime_rl": prime,
}
"""Files with rows of mixtures of experts."""

SWEEP: Mapping[str, Reader] = {"training_megatron_a100": vtrain}


def compare(files: Mapping[str, Reader], moe: bool | None, folder: Path) -> Evaluation | None:
    """All rows of these files: of mixtures of experts, of dense models, or (None) of both."""
    rows: list[Row] = []
    reasons: Counter[str] = Counter()
    for name, reader in files.items():
        found, why = parse(read(find(folder, f"{name}.csv")), reader)
        rows += [row for row in found if moe is None or row.shape.is_moe == moe]
        reasons.update(why)
    text = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    return evaluation(rows, sum(reasons.values()), text)


SETS: dict[str, Callable[[Path], Evaluation | None]] = {
    "training_dense": partial(compare, DENSE, False),
    **{f"training_dense.{n.removeprefix('training_')}": partial(compare, {n: f}, False) for n, f in DENSE.items()},
    "training_moe": partial(compare, MOE, True),
    **{f"training_moe.{n.removeprefix('training_')}": partial(compare, {n: f}, True) for n, f in MOE.items()},
    "training_sweep": partial(compare, SWEEP, None),
    "memory": partial(memory_rows.compare, tuple(memory_rows.FILES)),
    **{f"memory.{n}": partial(memory_rows.compare, (n,)) for n in memory_rows.FILES},
}
