"""Published training rows as one record, priced by the model's own code for an optimizer step."""

from __future__ import annotations

import csv
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from accuracy import Evaluation, constant_rate
from numpy.typing import NDArray

from analytic.fit import machine_of
from analytic.layers import spread_of
from analytic.lengths import Distribution
from analytic.microbatch import Batch, cut
from analytic.passes import update_memory
from analytic.setup import Machine
from analytic.training import Trainer, training
from analytic.update import train_step
from ir.batch import CODES
from ir.cluster import Group, Level
from ir.errors import InputError
from ir.known_models import known_config
from ir.model import shape_from_config
from ir.shape import ModelShape, Moe, with_lora
from ir.systems import known_device, system

Float = NDArray[np.float64]
Record = dict[str, str]

SYSTEMS = {
    "h100": "dgx-h100",
    "a100": "dgx-a100",
    "b200": "hgx-b200",
    "b300": "hgx-b300",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
    "h200": "dgx-h200",
}


EXCHANGE_HIDDEN = 0.85
"""Share of an overlapped exchange of experts' tokens: its kernels keep 20 of 132 to 148 processors from products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a table: a configuration and the seconds of its optimizer step."""

    framework: str
    gpu: str
    """Key of `SYSTEMS`, or the name of a device that stands alone."""
    num_gpus: int
    shape: ModelShape
    seq_len: int
    global_batch: float
    micro_batch: int
    seconds: float
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    zero: int = 1
    recompute: str = ""
    """Empty where a table does not say: then what fits, see `fitting`."""
    fp8: bool = False
    trainer: str = "flash"
    imbalance: float | None = None
    """Of experts' loads: 1 where a table says that routing is balanced by force."""
    logit_bytes: float | None = None
    """Kept per logit, where the framework's loss is another than its like have."""
    launched: float = 1.0
    """Of the launches of layers with experts, those that no CUDA graph holds."""
    adapters: float = 1.0
    """Of the traffic of adapters on all matrices of a layer, that of those which have one."""
    beside: float = 0.0
    """Seconds of a step that are no kernels."""
    samples: int = 1
    """That are packed into a sequence: none attends to another."""
    cut_up: bool = False
    """Whether collectives of tensor parallelism are cut up and overlapped with products, as userbuffers do."""
    attention_limit: float | None = None
    """FLOP/s of the attention core, where a recipe turns off the trainer's own."""
    overlaps_experts: bool = False
    """Whether experts' tokens are exchanged while another micro-batch computes."""
    exchanged: float = 1.0
    """Of the copies of tokens that routing at random sends to other devices, those that the row's routing sends."""

    @property
    def traits(self) -> Trainer:
        """What the row's trainer fuses and hides."""
        found = training().trainers[self.trainer]
        hidden = EXCHANGE_HIDDEN if self.overlaps_experts else found.expert_overlap
        return replace(
            found,
            logit_bytes=found.logit_bytes if self.logit_bytes is None else self.logit_bytes,
            adapters=self.adapters,
            tensor_overlap=training().trainers["userbuffers" if self.cut_up else self.trainer].tensor_overlap,
            attention_limit=found.attention_limit if self.attention_limit is None else self.attention_limit,
            expert_launches=found.expert_launches * self.launched,
            expert_overlap=1.0 - self.exchanged * (1.0 - hidden),
        )

    @property
    def dp(self) -> int:
        """Replicas."""
        return max(self.num_gpus // (self.tp * self.pp * self.cp), 1)

    @property
    def flops(self) -> float:
        """Of a step per device: three times the forward pass, two for frozen weights."""
        s = self.shape
        each = s.matmul_flops_per_token + s.attention_flops_per_token(self.seq_len // self.samples // 2)
        return each * (2.0 if s.lora_rank else 3.0) * self.global_batch * self.seq_len / self.num_gpus

    def columns(self) -> dict[str, NDArray[np.int32]]:
        """As of an update's section in a batch of one plan."""
        names = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "zero", "micro_batch")
        x = {name: getattr(self, name) for name in names}
        x["micro_batch"] *= self.samples
        x |= {"micro_tokens": 0, "offload": 0, "precision": int(self.fp8), "schedule": 0}
        x["recompute"] = CODES["recompute"].index(self.recompute or "none")
        return {name: np.array([value], dtype=np.int32) for name, value in x.items()}

    @property
    def batch(self) -> Batch:
        """Sequences or samples of equal length, all of whose tokens are trained on."""
        tokens = float(self.seq_len) / self.samples
        count = np.array([max(round(self.global_batch / self.dp), 1) * self.samples])
        lengths = Distribution((tokens, tokens))
        return Batch(count=count, lengths=lengths, head_share=1.0, longest=tokens, imbalance=self.imbalance)


def clocks(gpu: str) -> float:
    """Of a device whose power a table caps, `h100@500` with its watts: its clocks over those at the power of its data
    sheet. Power goes with the clocks and the square of the voltage, which goes with the clocks."""
    name, _, watts = gpu.partition("@")
    device = known_device(name, where="row") if name not in SYSTEMS else system(SYSTEMS[name], 1, where="row").device
    return (float(watts) / (device.watts or float(watts))) ** (1.0 / 3.0) if watts else 1.0


def _slowed(group: Group, share: float) -> Group:
    """Devices whose arithmetic has a share of their clocks; memory and links have their own."""
    device = group.device
    assert device.gemm is not None
    slow = msgspec.structs.replace(
        device,
        gemm=msgspec.structs.replace(device.gemm, flops=share * device.gemm.flops),
        attention_flops=share * device.attention_flops,
        peak_flops={name: share * flops for name, flops in device.peak_flops.items()},
    )
    return msgspec.structs.replace(group, device=slow)


@cache
def machine(gpu: str, num_gpus: int) -> Machine:
    """The devices of a row; a device without a system stands alone, or on PCIe with a few others."""
    if "@" in gpu:
        name = SYSTEMS[gpu.partition("@")[0]]
        return machine_of(_slowed(system(name, -(-num_gpus // 8) * 8, where="row").groups[0], clocks(gpu)))
    if gpu in SYSTEMS:
        # Jobs that fill racks in part are laid over whole ones.
        whole = 72 if "nvl72" in SYSTEMS[gpu] and num_gpus > 72 else 8 if num_gpus > 8 else 1
        return machine_of(system(SYSTEMS[gpu], -(-num_gpus // whole) * whole, where="row").groups[0])
    if gpu == "a100-40":
        group = system("dgx-a100", num_gpus, where="row").groups[0]
        return machine_of(Group(name=gpu, device=known_device(gpu, where="row"), levels=group.levels))
    level = Level(name="node", size=num_gpus, latency_s=1e-5, bandwidth=20e9)
    return machine_of(Group(name=gpu, device=known_device(gpu, where="row"), levels=(level,)))


@cache
def _models() -> dict[str, dict[str, object]]:
    return tomllib.loads((Path(__file__).parent / "data" / "training_models.toml").read_text(encoding="utf-8"))


def model(name: str, layers: int = 0, lora: int = 0) -> ModelShape | None:
    """The sizes of a model by the name that a table gives it; None if they are not known."""
    data = _models()
    name = str(data["alias"].get(name, name))
    facts = data["models"].get(name)
    shape = gpt(**facts) if isinstance(facts, dict) else _known(name)
    if shape is None:
        return None
    if layers and layers != shape.layers:
        moe = replace(shape.moe, dense_at=tuple(i for i in shape.moe.dense_at if i < layers)) if shape.moe else None
        shape = replace(shape, layers=layers, windows=shape.windows[:layers], moe=moe)
    return with_lora(shape, lora)


def pieces(name: str, pp: int) -> int:
    """Pieces of a pipeline rank that other rows of the model's recipe print."""
    data = _models()
    found = data["pieces"].get(str(data["alias"].get(name, name)))
    return int(found.get(str(pp), 1)) if isinstance(found, dict) else 1


def _known(name: str) -> ModelShape | None:
    try:
        return shape_from_config(known_config(name, where="row"), where="row")
    except InputError:
        return None


def gpt(
    *, layers: int, hidden: int, heads: int, ffn: int, vocab: int, kv_heads: int = 0, tied: bool = False,
    experts: int = 0, experts_per_token: int = 0,
) -> ModelShape:  # fmt: skip
    """A decoder from the sizes that tables print."""
    moe = Moe(experts=experts, experts_per_token=experts_per_token, ffn=ffn) if experts else None
    return ModelShape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads or heads, head_dim=hidden // heads, ffn=ffn,
        vocab=vocab, tied=tied, qkv_bias=False, qk_norm=False, moe=moe,
    )  # fmt: skip


def read(path: Path | None) -> list[Record]:
    """Rows of a CSV file; none if it is not there."""
    if path is None:
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def integer(r: Record, name: str, default: int = 1) -> int:
    """A printed whole number, or the default where nothing is printed."""
    text = r.get(name, "")
    return int(float(text)) if text else default


def gpu_of(text: str) -> str:
    """Key of the device that a table's text names."""
    lowered = text.lower()
    keys = ("gb300", "gb200", "b300", "b200", "h200", "h100", "a100")
    if "a6000" in lowered:
        return "rtx-a6000"
    if "40gb" in lowered:
        return "a100-40"
    return next((key for key in keys if key in lowered), "")


def step_seconds(row: Row) -> dict[str, float]:
    """Predicted seconds of a row by kind."""
    x, m = row.columns(), machine(row.gpu, row.num_gpus)
    at = spread_of(x, x["dp"].astype(np.int64))
    kinds, _ = train_step(m, row.shape, at, x, row.batch, row.traits)
    return {kind: float(seconds[0]) for kind, seconds in kinds.items()} | {"other": row.beside}


def terms(row: Row) -> dict[str, float]:
    """Bytes of a device by name at the peak of a training step, as an allocator counts them: without the context."""
    x, m = row.columns(), machine(row.gpu, row.num_gpus)
    at = spread_of(x, x["dp"].astype(np.int64))
    micro = cut(m, x, row.batch, at.cp)
    resident, transient = update_memory(m, row.shape, at, x, micro, row.traits)
    # A name may be in both, as what stays or what waits in host memory between steps.
    found = {
        name: float((resident.get(name, 0.0) + transient.get(name, np.zeros(1)))[0]) for name in (resident | transient)
    }
    found.pop("communicators", None)
    return found


def fitting(row: Row) -> Row:
    """A row whose table does not say what is recomputed: nothing if the model says that it fits, since it ran; else
    whole layers."""
    if row.recompute:
        return row
    device = machine(row.gpu, row.num_gpus).device
    fits = sum(terms(row).values()) + device.base_memory_bytes <= device.memory_bytes
    return replace(row, recompute="none" if fits else "full")


def evaluation(rows: Sequence[Row], left_out: int, why: str) -> Evaluation | None:
    """Rows against the model; the baseline is a constant rate per device and precision."""
    if not rows:
        return None
    rows = [fitting(row) for row in rows]
    measured = np.array([row.seconds for row in rows])
    predicted = np.array([sum(step_seconds(row).values()) for row in rows])
    flops = np.array([row.flops for row in rows])
    return Evaluation(
        predicted=predicted,
        measured=measured,
        groups=[f"{row.gpu} {row.framework}" for row in rows],
        baseline=constant_rate(flops, measured, [f"{row.gpu} {row.fp8}" for row in rows]),
        left_out=left_out,
        why_left_out=why,
    )


def parse(records: Iterable[Record], to_row: Callable[[Record], Row | str]) -> tuple[list[Row], dict[str, int]]:
    """Rows that can be priced, and how many were left out for which reason."""
    rows: list[Row] = []
    reasons: dict[str, int] = defaultdict(int)
    for r in records:
        row = to_row(r)
        if isinstance(row, str):
            reasons[row] += 1
        else:
            rows.append(row)
    return rows, dict(reasons)
