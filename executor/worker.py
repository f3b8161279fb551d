"""A device: one process, pinned to its cores or its GPU, that holds models and does what the controller says.

A worker knows no plan. It is told a setting once per run, and then answers
generate calls and visits one at a time, in the order in which they arrive.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from executor import attention
from executor.engine import Engine
from executor.links import measure_collective, measure_overlap
from executor.memory import Memory
from executor.microbench import DeviceFigures, measure_device
from executor.policy import encode_prompt
from executor.records import Call, Finding, GenerateReply, Request, Row, Sample, Setting, Tokens, VisitReply, Weights
from executor.rewards import advantages, reward
from executor.tasks import Prompt, prompts
from executor.trainer import Trainer, score
from executor.weights import assign, flatten
from ir.errors import InputError
from ir.graph import Op
from ir.job import Lengths, Workload
from traces.schema import Span

LENGTH_SAMPLES = 512
LENGTH_QUANTILES = 101

SLICE_SECONDS = 0.1
"""Longest time an engine decodes before it looks for new weights and new prompts."""


class DeviceWorker:
    """The methods that the runtime calls through Ray. Times are of this process; everything else is an argument."""

    def __init__(self, *, device_id: int, cores: Sequence[int], kind: str) -> None:
        if cores:
            os.sched_setaffinity(0, cores)
        torch.set_num_threads(max(len(cores), 1))
        self._device_id = device_id
        # A torch for AMD's GPUs calls them as NVIDIA's are called.
        self._device = torch.device("cpu" if kind == "cpu" else "cuda")
        self._memory = Memory(self._device)
        self._model_path = ""
        self._initial: Weights = np.empty(0, dtype=np.float32)
        self._groups: dict[int, dist.ProcessGroup | None] = {}

    def ready(self) -> tuple[int, int]:
        """(process id, bytes occupied), once the process is up."""
        return os.getpid(), self._memory.now()

    def join(self, *, rank: int, size: int, address: str) -> None:
        """Form the pool's torch.distributed mesh; `address` is host:port of rank 0's store."""
        if size == 1:
            return
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"tcp://{address}", rank=rank, world_size=size)
        self._groups[size] = dist.group.WORLD

    def form(self, ranks: int) -> None:
        """Have a group of the pool's first `ranks` workers; all workers of the pool must be called."""
        if ranks > 1 and ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(range(ranks)))

    def measure(self) -> DeviceFigures:
        """Figures of this device."""
        return measure_device(self._device)

    def collective(self, *, op: str, size: int, ranks: int, beside: bool = False) -> float:
        """Over the first `ranks` workers, all of which must be called: median seconds, or share hidden by products."""
        return (measure_overlap if beside else measure_collective)(op, size, self._groups[ranks], self._device)

    def begin(self, setting: Setting) -> None:
        """Get ready for a run: initial weights, fresh optimizer, empty cache."""
        # First of all: what fails on one worker must not leave the others waiting for it.
        self.form(setting.training_ranks)
        self._setting = setting
        self._load(setting.model_path)
        self._trainer = None
        self._engine = None
        self._reference = None
        self._memory.reset(setting.memory_limit)
        assign(self._actor, self._initial)
        workload = setting.workload
        if setting.trains:
            self._trainer = Trainer(self._actor, setting.algorithm, temperature=workload.temperature)
        if setting.refers:
            self._reference = copy.deepcopy(self._actor).requires_grad_(False)
        if setting.slots:
            self._engine = self._new_engine(workload, setting.slots)
        self._open: dict[int, int] = {}
        self._memory.check()

    def _new_engine(self, workload: Workload, slots: int) -> Engine:
        return Engine(
            self._actor,
            slots=slots,
            max_prompt_tokens=workload.max_prompt_tokens,
            max_response_tokens=workload.max_response_tokens,
            temperature=workload.temperature,
            stop_token=self._tokenizer.eos_token_id,
            seed=workload.seed + 1_000_003 * (self._device_id + 1),
        )

    def _encode(self, prompt: Prompt, limit: int) -> Tokens:
        tokens = np.array(encode_prompt(self._tokenizer, prompt), dtype=np.int64)
        if len(tokens) > limit:
            raise InputError(
                "workload.max_prompt_tokens", f"must hold prompt {prompt.index}, {len(tokens)} tokens", limit
            )
        return tokens

    def _load(self, path: str) -> None:
        if path == self._model_path:
            return
        attention.register()
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention.NAME)
        self._actor: PreTrainedModel = model.to(self._device).eval()
        self._initial = flatten(self._actor)
        self._model_path = path

    def sample_lengths(self, workload: Workload, model_path: str) -> Lengths:
        """Quantiles of prompt and response lengths over a few hundred samples of the model, one a prompt: samples of
        one prompt are alike and would say less."""
        self._load(model_path)
        assign(self._actor, self._initial)
        engine = self._new_engine(workload, slots=min(LENGTH_SAMPLES, 64))
        asked = prompts(workload, first=0, count=LENGTH_SAMPLES)
        requests = [Request(group=p.index, member=0, prompt=self._encode(p, workload.max_prompt_tokens)) for p in asked]
        engine.submit(requests)
        samples: list[Sample] = []
        while not engine.idle:
            samples += engine.step()
        at = np.linspace(0.0, 1.0, LENGTH_QUANTILES)
        return Lengths(
            prompt=tuple(np.quantile([len(s.prompt) for s in samples], at).tolist()),
            response=tuple(np.quantile([len(s.response) for s in samples], at).tolist()),
        )

    def peak_bytes(self) -> int:
        """Most bytes occupied since the run began."""
        return self._memory.peak()

    # Generation

    def generate(
        self, *, groups: Sequence[int], step: int, version: int, weights: Weights | None, drain: bool
    ) -> GenerateReply:
        """Decode. Loads `weights` first if given. Returns when everything is finished (`drain`), or else when a
        group is finished, slots are free for more, or a time slice is over."""
        assert self._engine is not None
        spans: list[Span] = []
        if weights is not None:
            with self._span(step, Op.SYNC_WEIGHTS, spans):
                assign(self._actor, weights)
        self._engine.version = version
        finished: list[Sample] = []
        with self._span(step, Op.GENERATE, spans) as count:
            self._engine.submit(self._requests(groups))
            deadline = time.monotonic() + SLICE_SECONDS
            while not self._engine.idle:
                samples = self._engine.step()
                finished += samples
                self._memory.check()
                if not drain and (self._closes(samples) or time.monotonic() > deadline):
                    break
            count(len(finished), sum(len(s.response) for s in finished))
        return GenerateReply(samples=tuple(finished), spans=tuple(spans))

    def _requests(self, groups: Sequence[int]) -> list[Request]:
        workload = self._setting.workload
        requests = []
        for group in groups:
            (prompt,) = prompts(workload, first=group, count=1)
            tokens = self._encode(prompt, workload.max_prompt_tokens)
            self._open[group] = workload.samples_per_prompt
            requests += [
                Request(group=group, member=member, prompt=tokens) for member in range(workload.samples_per_prompt)
            ]
        return requests

    def _closes(self, samples: Sequence[Sample]) -> bool:
        """Whether these samples finish a group."""
        closed = False
        for sample in samples:
            self._open[sample.group] -= 1
            if not self._open[sample.group]:
                del self._open[sample.group]
                closed = True
        return closed

    # Visits

    def visit(self, call: Call, minibatches: Sequence[Sequence[Row]]) -> VisitReply:
        """Do the operations of a stage on this rank's rows, in order."""
        spans: list[Span] = []
        rows = [row for batch in minibatches for row in batch]
        with self._span(call.step, "+".join(call.ops), spans) as count:
            count(len(rows), sum(row.sample.num_tokens for row in rows))
            if Op.UPDATE_ACTOR in call.ops:
                metrics = self._update(call, minibatches)
                reply = VisitReply(metrics=metrics)
            else:
                reply = VisitReply(findings=tuple(self._findings(call, rows)))
            self._memory.check()
        return VisitReply(findings=reply.findings, metrics=reply.metrics, spans=tuple(spans))

    def _findings(self, call: Call, rows: Sequence[Row]) -> list[Finding]:
        if call.ops == (Op.REWARD,):
            return [Finding(key=row.sample.key, reward=self._reward(row.sample)) for row in rows]
        if call.ops == (Op.ADVANTAGE,):
            return advantages(rows)
        models = [self._model_of(op) for op in call.ops]
        samples = [row.sample for row in rows]
        workload = self._setting.workload
        found = score(models, samples, micro_batch=call.micro_batch, temperature=workload.temperature)
        by_op = dict(zip(call.ops, found, strict=True))
        return [
            Finding(
                key=sample.key,
                reference_logprob=by_op.get(Op.REFERENCE_LOGPROB, {}).get(sample.key),
                old_logprob=by_op.get(Op.OLD_LOGPROB, {}).get(sample.key),
            )
            for sample in samples
        ]

    def _model_of(self, op: Op) -> PreTrainedModel:
        if op is Op.OLD_LOGPROB:
            return self._actor
        assert op is Op.REFERENCE_LOGPROB and self._reference is not None
        return self._reference

    def _reward(self, sample: Sample) -> float:
        return reward(
            self._setting.workload, sample.group, self._tokenizer.decode(sample.response, skip_special_tokens=True)
        )

    def _update(self, call: Call, minibatches: Sequence[Sequence[Row]]) -> dict[str, float]:
        assert self._trainer is not None
        reduce = partial(dist.all_reduce, group=self._groups[call.ranks]) if call.ranks > 1 else None
        metrics: dict[str, float] = {}
        for _ in range(call.epochs):
            for rows, sequences in zip(minibatches, call.minibatch_sequences, strict=True):
                metrics = self._trainer.update(
                    rows, sequences=sequences, micro_batch=call.micro_batch, recompute=call.recompute, reduce=reduce
                )
                self._memory.check()
        return metrics

    # Weights

    def publish(self, step: int) -> tuple[Weights, tuple[Span, ...]]:
        """The actor's weights in one block, for other pools."""
        spans: list[Span] = []
        with self._span(step, Op.SYNC_WEIGHTS, spans):
            weights = flatten(self._actor)
        return weights, tuple(spans)

    def broadcast(self, step: int) -> tuple[Span, ...]:
        """Bring the weights of rank 0 to the ranks of this pool that did not train."""
        spans: list[Span] = []
        with self._span(step, Op.SYNC_WEIGHTS, spans):
            flat = torch.from_numpy(flatten(self._actor)).to(self._device)
            dist.broadcast(flat, src=0)
            assign(self._actor, flat.cpu().numpy())
        return tuple(spans)

    @contextmanager
    def _span(self, step: int, stage: str, spans: list[Span]) -> Iterator[Callable[[int, int], None]]:
        size = [0, 0]

        def count(sequences: int, tokens: int) -> None:
            size[:] = [sequences, tokens]

        start = time.time()
        yield count
        spans.append(
            Span(
                run_id=self._setting.run_id,
                step=step,
                stage=stage,
                pool=self._setting.pool,
                device=self._device_id,
                start_s=start - self._setting.started,
                end_s=time.time() - self._setting.started,
                sequences=size[0],
                tokens=size[1],
            )
        )
