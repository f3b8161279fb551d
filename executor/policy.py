"""The policy a run starts from: tokenizer, weights, and the supervised warm start that makes them.

A warm start depends on the job only. It is written beside its final place and renamed
when it is whole, so a directory under the cache is always a finished one.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from executor.tasks import Prompt, demonstration, prompts, wording
from ir.errors import InputError
from ir.job import RUNNABLE_ACTOR, Job, WarmStart, Workload

Progress = Callable[[int, int, float], None]
"""Called after each supervised step with the step (from 1), the number of steps and the loss."""

ANSWER_INSTRUCTION = "Give the final answer between <answer> and </answer>."
"""Added to a question for a model with a chat template; a warm start teaches the format instead."""

_PAD, _EOS, _UNK = "<pad>", "<eos>", "<unk>"
_TAGS = ("<answer>", "</answer>")
_SYMBOLS = "0123456789+-*/=().,:;?!'\"%$"
_PIECES = r"</?answer>|[A-Za-z]+|[^A-Za-z\s]"

_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")

_WARMUP_SHARE = 0.05
_MOMENTUM = 0.9
_ADAM_SCALE = 0.2
"""Root mean square of a typical AdamW update, relative to its learning rate (Liu et al., 2025)."""
_POLYNOMIALS = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037))
"""(a, b, c) of a x + b x^3 + c x^5, one iteration each; three bring all but tiny singular values to 0.4-1.3."""
_OTHER_SEED = 0x5EED
"""Sets the demonstrations' prompts apart from those that reinforcement learning draws."""
_FIRST_SHOWN, _ALL_SHOWN = 0.3, 0.8
_POOL = 16
"""Batches that are drawn and sorted by length together, so that a batch holds little padding."""
_IGNORED = -100
"""Label of a position that has no part in the loss."""


def build_tokenizer(workload: Workload) -> PreTrainedTokenizerFast:
    """A tokenizer of digits, symbols, answer tags and the words of the workload's questions.

    The words that all questions of a task begin with are one token together, for they say nothing.
    White space is dropped, and decoding joins tokens without any.
    """
    words, openings = wording(workload, _PIECES)
    tokens = dict.fromkeys([_PAD, _EOS, _UNK, *_TAGS, *_SYMBOLS, *words])
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=_UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), behavior="removed"),
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
        ]
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(opening, normalized=False) for opening in openings])
    names = {"pad_token": _PAD, "eos_token": _EOS, "unk_token": _UNK}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)


def encode_prompt(tokenizer: PreTrainedTokenizerFast, prompt: Prompt) -> list[int]:
    """Token ids that a response to `prompt` follows.

    With a chat template the question becomes a user's message that asks for answer tags.
    """
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(prompt.question, add_special_tokens=False))
    message = {"role": "user", "content": f"{prompt.question}\n{ANSWER_INSTRUCTION}"}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(str(text), add_special_tokens=False))


def prepare_actor(job: Job, cache: Path, progress: Progress | None = None) -> Path:
    """A Hugging Face directory with the actor's initial weights and tokenizer: one that is given is checked and used as
    it is, a config.json is warm-started, once, into `cache`/<identity of the job>.

    Raises:
        InputError: there are no weights and nothing that makes them, no tokenizer, a vocabulary too small for the
            workload's tokenizer, or a task that is unknown or has no worked solutions.
    """
    if job.actor_path.is_dir():
        return _checked_directory(job.actor_path)
    if job.document.models.actor.warm_start is None:
        raise InputError("models.actor", RUNNABLE_ACTOR, job.actor_path)
    target = cache / job.identity
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{job.identity}.", dir=cache))
    try:
        _build(job, temporary, progress)
        _publish(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _checked_directory(path: Path) -> Path:
    for names, what in ((_WEIGHTS, "weights"), (_TOKENIZERS, "a tokenizer")):
        if not any((path / name).is_file() for name in names):
            raise InputError("models.actor.path", f"must hold {what} ({', '.join(names)})", path)
    return path


def _publish(temporary: Path, target: Path) -> None:
    try:
        temporary.rename(target)
    except OSError:
        # Another process finished the same warm start first; its result is equal to ours.
        if not target.is_dir():
            raise


def _build(job: Job, directory: Path, progress: Progress | None) -> None:
    tokenizer = build_tokenizer(job.workload)
    model = _initial_model(job, tokenizer)
    warm_start = job.document.models.actor.warm_start
    assert warm_start is not None
    with _one_thread():
        _train(model, tokenizer, job.workload, warm_start, progress)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _initial_model(job: Job, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(job.actor_path)
    if config.vocab_size < len(tokenizer):
        raise InputError(
            f"{job.actor_path}: vocab_size",
            f"must be at least {len(tokenizer)}, the tokens of this workload's tokenizer",
            config.vocab_size,
        )
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    config.bos_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.workload.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class _Example:
    """A demonstration as token ids."""

    ids: list[int]
    """Prompt, response and end token."""
    prompt_tokens: int


class _Muon:
    """Momentum whose update of each matrix is made nearly orthogonal (Jordan et al., 2024).

    Worked solutions of arithmetic are learnt in fewer tokens than with AdamW. In float32, because many
    CPUs multiply bfloat16 slowly, and by shape, because the matrices are small.
    """

    def __init__(self, matrices: list[Tensor]) -> None:
        self._groups: dict[torch.Size, list[Tensor]] = {}
        for matrix in matrices:
            self._groups.setdefault(matrix.shape, []).append(matrix)
        self._momenta = {shape: torch.zeros(len(group), *shape) for shape, group in self._groups.items()}

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update from the gradients, on the scale of AdamW's updates, so that both share a rate."""
        for shape, group in self._groups.items():
            gradients = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            momentum = self._momenta[shape].lerp_(gradients, 1 - _MOMENTUM)
            updates = _orthogonalised(gradients.lerp(momentum, _MOMENTUM))
            for matrix, update in zip(group, updates, strict=True):
                matrix.sub_(update, alpha=learning_rate * _ADAM_SCALE * math.sqrt(max(shape)))


def _orthogonalised(matrices: Tensor) -> Tensor:
    """Singular values of [n, rows, columns] moved close to 1, by odd polynomials of the matrices."""
    tall = matrices.shape[1] > matrices.shape[2]
    if tall:
        matrices = matrices.mT  # the smaller Gram matrix
    x: Tensor = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-12)
    for a, b, c in _POLYNOMIALS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    workload: Workload,
    warm_start: WarmStart,
    progress: Progress | None,
) -> None:
    """Minimise the cross-entropy of the demonstrations' response tokens, in place."""
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    others = [p for p in model.parameters() if p.ndim != 2 or p is embedding]
    muon, adam = _Muon(matrices), torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step, batch in enumerate(_batches(tokenizer, workload, warm_start), start=1):
        loss = _loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = warm_start.learning_rate * _schedule(step, warm_start.steps)
        muon.step(rate)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
        model.zero_grad()
        if progress is not None:
            progress(step, warm_start.steps, loss.item())
    model.eval()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Two threads on two cores gain little when idle, and lose a factor of 10 and more beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _loss(model: PreTrainedModel, batch: list[_Example]) -> Tensor:
    ids, labels = _padded(batch, model.config.pad_token_id)
    logits = model(input_ids=ids, use_cache=False).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)


def _schedule(step: int, steps: int) -> float:
    """Factor on the learning rate: a short linear rise, then half a cosine down to 0."""
    warmup = max(1, round(steps * _WARMUP_SHARE))
    if step < warmup:
        return step / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _batches(tokenizer: PreTrainedTokenizerFast, workload: Workload, warm_start: WarmStart) -> Iterator[list[_Example]]:
    """One batch per step, of examples of similar length, the shortest ones first.

    The steps of a solution are learnt soonest where few tokens surround them: at first only the shortest
    third of what the workload asks is shown, and everything from `_ALL_SHOWN` of the steps on.
    """
    other = msgspec.structs.replace(workload, seed=workload.seed ^ _OTHER_SEED, distinct_prompts=None)
    random = Random(workload.seed)
    size, step, first = warm_start.batch, 0, 0
    while step < warm_start.steps:
        pool = [_example(tokenizer, prompt) for prompt in prompts(other, first=first, count=size * _POOL)]
        pool.sort(key=lambda example: len(example.ids))
        share = min(1.0, _FIRST_SHOWN + (1 - _FIRST_SHOWN) * step / (_ALL_SHOWN * warm_start.steps))
        shown = min(round(share * _POOL), warm_start.steps - step)
        batches = [pool[size * k : size * (k + 1)] for k in range(round(share * _POOL))]
        random.shuffle(batches)
        yield from batches[:shown]
        first, step = first + len(pool), step + shown


def _example(tokenizer: PreTrainedTokenizerFast, prompt: Prompt) -> _Example:
    question = encode_prompt(tokenizer, prompt)
    response = tokenizer.encode(demonstration(prompt), add_special_tokens=False)
    assert isinstance(tokenizer.eos_token_id, int)
    return _Example(ids=[*question, *response, tokenizer.eos_token_id], prompt_tokens=len(question))


def _padded(examples: list[_Example], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and labels, both [examples, longest]. Padding is on the right, so causal attention needs no mask."""
    longest = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), longest), pad)
    labels = torch.full((len(examples), longest), _IGNORED)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        labels[row, example.prompt_tokens : len(example.ids)] = torch.tensor(example.ids[example.prompt_tokens :])
    return ids, labels
