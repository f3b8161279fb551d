"""Models known by name: against the counts their makers publish and against transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ir.errors import InputError
from ir.known_models import KNOWN, known_config, published_parameters
from ir.model import SUPPORTED, ModelShape, shape_from_config


def shape(name: str) -> ModelShape:
    return shape_from_config(known_config(name, where=name), where=name)


SIZES = tuple({json.dumps(known_config(name, where=""), sort_keys=True): name for name in reversed(KNOWN)}.values())
"""One name of each size."""

ROUGH = {"zai-org/GLM-4.5": 0.01, "zai-org/GLM-4.5-Air": 0.01}
"""Published with the multi-token-prediction layer, or without the embeddings: see the notes in the table."""


def test_the_table_has_the_field() -> None:
    kinds = {known_config(name, where="")["model_type"] for name in KNOWN}
    assert len(SIZES) == len({shape(name) for name in KNOWN}) >= 46
    assert kinds == set(SUPPORTED)
    assert len({name.lower() for name in KNOWN} | {name.rsplit("/", 1)[1].lower() for name in KNOWN}) == 2 * len(KNOWN)


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_the_published_ones(name: str) -> None:
    total, active, source = published_parameters(name)
    assert shape(name).parameters == pytest.approx(total, rel=ROUGH.get(name, 0.005))
    assert (active is not None) == shape(name).is_moe
    assert len(source) > 10


@pytest.mark.parametrize(
    ("name", "embedding_counts", "unit"),
    [
        ("openai/gpt-oss-20b", False, 0.01e9),
        ("openai/gpt-oss-120b", False, 0.01e9),
        ("deepseek-ai/DeepSeek-V3", False, 0.1e9),
        ("deepseek-ai/DeepSeek-V2-Lite", False, 0.1e9),
        ("deepseek-ai/DeepSeek-V2", False, 1e9),
        ("moonshotai/Kimi-K2-Instruct", False, 1e9),
        ("zai-org/GLM-4.5", False, 1e9),
        ("zai-org/GLM-4.5-Air", False, 1e9),
        ("mistralai/Mixtral-8x7B-v0.1", True, 0.1e9),
        ("mistralai/Mixtral-8x22B-v0.1", True, 0.1e9),
        ("moonshotai/Moonlight-16B-A3B", True, 1e9),
        ("Qwen/Qwen3-30B-A3B", True, 0.1e9),
        ("Qwen/Qwen3-235B-A22B", True, 1e9),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", True, 1e9),
    ],
)
def test_active_parameters_are_the_published_ones(name: str, embedding_counts: bool, unit: float) -> None:
    """Within one unit of the last digit published, as some are cut and some are rounded."""
    counted = shape(name).active_parameters + (shape(name).embedding_parameters if embedding_counts else 0)
    assert counted == pytest.approx(published_parameters(name)[1], abs=unit)


@pytest.mark.parametrize(("name", "hub"), [("GLM-4.5", 358_337_791_296), ("GLM-4.5-Air", 110_468_824_832)])
def test_the_hubs_count_of_glm_is_the_main_model_and_its_prediction_layer(name: str, hub: int) -> None:
    s = shape(name)
    assert s.moe is not None
    projection, norms, tables = 2 * s.hidden**2, 3 * s.hidden, 2 * s.embedding_parameters
    corrections = (s.num_moe_layers + 1) * s.moe.experts
    assert s.parameters + s.layer_parameters + projection + norms + tables + corrections == hub


def test_counts_and_windows_of_all_sizes_are_those_of_transformers() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for name in SIZES:
        config = known_config(name, where="")
        sizes = {k: v for k, v in config.get("text_config", config).items() if k != "sliding_window_pattern"}
        kind = {"kimi_k2": "deepseek_v3"}.get(sizes["model_type"], sizes["model_type"])
        theirs = AutoConfig.for_model(kind, **{k: v for k, v in sizes.items() if k != "model_type"})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(theirs)
        assert shape(name).parameters == sum(p.numel() for p in model.parameters()), name
        assert (shape(name).windows or (0,) * shape(name).layers) == their_windows(theirs), name


def their_windows(config: Any) -> tuple[int, ...]:
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or 0
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def test_names_are_found_in_any_case_and_without_their_owner() -> None:
    assert known_config("qwen2.5-7b-instruct", where="") == known_config("Qwen/Qwen2.5-7B", where="")
    assert published_parameters("OPENAI/gpt-oss-20b")[:2] == (20_910_000_000, 3_610_000_000)
    known_config("Qwen3-8B", where="")["hidden_size"] = 1
    assert known_config("Qwen3-8B", where="")["hidden_size"] == 4096


def test_an_unknown_name_is_refused_with_the_closest() -> None:
    with pytest.raises(InputError) as caught:
        known_config("Qwen/Qwen3-9B-Instruct", where="job.toml: models.actor.name")
    assert str(caught.value) == (
        "job.toml: models.actor.name: must be a known model, such as Qwen/Qwen3-8B or Qwen/Qwen3-4B or Qwen/Qwen3-32B, "
        "got 'Qwen/Qwen3-9B-Instruct'"
    )
