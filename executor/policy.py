"""The policy a run starts from: tokenizer, weights, and the supervised warm start that makes them.

A warm start depends on the job only. It is written beside its final place and renamed
when it is whole, so a directory under the cache is always a finished one.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from executor.tasks import Prompt, demonstration, prompts
from ir.errors import InputError
from ir.job import Job, WarmStart, Workload

Progress = Callable[[int, int, float], None]
"""Called after each supervised step with the step (from 1), the number of steps and the loss."""

ANSWER_INSTRUCTION = "Give the final answer between <answer> and </answer>."
"""Added to a question for a model with a chat template; a warm start teaches the format instead."""

_PAD, _EOS, _UNK = "<pad>", "<eos>", "<unk>"
_TAGS = ("<answer>", "</answer>")
_SYMBOLS = "0123456789+-*/=().,:;?!'\"%$"
_PIECES = r"</?answer>|[A-Za-z]+|[^A-Za-z\s]"
_VOCABULARY_SAMPLE = 256
"""Questions per task that the words are collected from: templates are few, so that finds them all."""

_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")

_WARMUP_SHARE = 0.05
_POOL = 16
"""Batches that are drawn and sorted by length together, so that a batch holds little padding."""
_IGNORED = -100
"""Label of a position that has no part in the loss."""


def build_tokenizer(workload: Workload) -> PreTrainedTokenizerFast:
    """A tokenizer of digits, symbols, answer tags and the words of the workload's questions.

    White space is dropped, and decoding joins tokens without any.
    """
    special = [_PAD, _EOS, _UNK]
    tokens = [*special, *_TAGS, *_SYMBOLS, *sorted(_words(workload))]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=_UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), behavior="removed"),
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
        ]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        eos_token=_EOS,
        unk_token=_UNK,
        clean_up_tokenization_spaces=False,
    )


def _words(workload: Workload) -> set[str]:
    pieces = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    found: set[str] = set()
    for prompt in prompts(workload, first=0, count=_VOCABULARY_SAMPLE * len(workload.tasks)):
        for word in prompt.question.split():
            found.update(piece for piece, _ in pieces.pre_tokenize_str(word))
    return found


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
    """A Hugging Face directory with the actor's initial weights and tokenizer.

    A directory is checked and used as it is. A config.json is warm-started, once, into
    `cache`/<identity of the job>.

    Raises:
        InputError: the directory lacks weights or a tokenizer, the vocabulary is too small for the
            workload's tokenizer, or a task is unknown or has no worked solutions.
    """
    if job.actor_path.is_dir():
        return _checked_directory(job.actor_path)
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
    assert warm_start is not None, "resolve() asks for a warm start when the actor is a config.json"
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


def _train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    workload: Workload,
    warm_start: WarmStart,
    progress: Progress | None,
) -> None:
    """Minimise the cross-entropy of the demonstrations' response tokens, in place."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=warm_start.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    batches = _batches(tokenizer, workload, warm_start)
    model.train()
    for step in range(1, warm_start.steps + 1):
        ids, labels = _padded(next(batches), model.config.pad_token_id)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = warm_start.learning_rate * _schedule(step, warm_start.steps)
        optimizer.step()
        optimizer.zero_grad()
        if progress is not None:
            progress(step, warm_start.steps, loss.item())
    model.eval()


def _schedule(step: int, steps: int) -> float:
    """Factor on the learning rate: a short linear rise, then half a cosine down to 0."""
    warmup = max(1, round(steps * _WARMUP_SHARE))
    if step < warmup:
        return step / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _batches(tokenizer: PreTrainedTokenizerFast, workload: Workload, warm_start: WarmStart) -> Iterator[list[_Example]]:
    """Endless batches of examples of similar length, in random order."""
    other = msgspec.structs.replace(workload, seed=workload.seed ^ 0x5EED)  # prompts that RL will not see
    random = Random(workload.seed)
    size, first = warm_start.batch, 0
    while True:
        pool = [_example(tokenizer, prompt) for prompt in prompts(other, first=first, count=size * _POOL)]
        pool.sort(key=lambda example: len(example.ids))
        batches = [pool[start : start + size] for start in range(0, len(pool), size)]
        random.shuffle(batches)
        yield from batches
        first += size * _POOL


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
