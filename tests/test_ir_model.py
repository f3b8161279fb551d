"""Shapes of models: against transformers, and against sums done by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import build
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.errors import InputError
from ir.known_models import KNOWN, known_config
from ir.model import ModelShape, Moe, read_config, shape_from_config, with_lora


def shape(name: str) -> ModelShape:
    return shape_from_config(known_config(name, where=name), where=name)


SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 64, "vocab_size": 64, "pad_token_id": 0,
}  # fmt: skip


MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "llama", "attention_bias": True, "sliding_window": 8}, ()),
        ({"model_type": "qwen2", "tie_word_embeddings": True, "sliding_window": 8}, ()),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (0, 0, 0, 8)),
        ({"model_type": "qwen3", "attention_bias": True}, ()),
        ({"model_type": "qwen3_moe", "num_experts": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3], **MOE}, ()),
        ({"model_type": "qwen3_moe", "num_experts": 6, "use_sliding_window": True, "sliding_window": 8, **MOE}, (8, 8, 8, 8)),
        ({"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 8}, (8, 8, 8, 8)),
        ({"model_type": "phi3", "sliding_window": 8}, (8, 8, 8, 8)),
        ({"model_type": "gemma2", "attention_bias": True, "sliding_window": 8}, (8, 0, 8, 0)),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention", *["sliding_attention"] * 3], "sliding_window": 8}, (0, 8, 8, 8)),
        ({"model_type": "gpt_oss", "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 8}, (8, 0, 8, 0)),
        ({"model_type": "gpt_oss", "num_local_experts": 3, "num_experts_per_tok": 2, "attention_bias": False, "sliding_window": 8}, (8, 0, 8, 0)),
        ({"model_type": "glm4_moe", "n_routed_experts": 3, "n_shared_experts": 2, "first_k_dense_replace": 2, "use_qk_norm": True, "attention_bias": True, **MOE}, ()),
    ],
)  # fmt: skip
def test_variants_count_as_in_transformers(config: dict[str, Any], windows: tuple[int, ...]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    full = SMALL | config
    theirs = AutoConfig.for_model(full["model_type"], **{k: v for k, v in full.items() if k != "model_type"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    ours = shape_from_config(full, where="test")
    assert ours.parameters == sum(p.numel() for p in model.parameters())
    assert ours.windows == windows


def test_layers_with_experts_are_those_the_configuration_says() -> None:
    moe = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    steps = {"model_type": "qwen3_moe", "decoder_sparse_step": 2, "mlp_only_layers": [3], **moe}
    s = shape_from_config(SMALL | steps, where="test")
    assert s.moe == Moe(experts=6, experts_per_token=2, ffn=16, dense_at=(0, 2, 3))
    assert (s.num_moe_layers, s.num_dense_layers, s.is_moe) == (1, 3, True)
    change = {"num_hidden_layers": 5, "first_k_dense_replace": 1, "moe_layer_freq": 2}
    sparse = shape_from_config(known_config("DeepSeek-V3", where="") | change, where="test")
    assert sparse.moe is not None and sparse.moe.dense_at == (0, 1, 3)
    v3, dense = shape("DeepSeek-V3"), shape("Qwen3-8B")
    assert (v3.num_moe_layers, v3.num_dense_layers) == (58, 3)
    assert (dense.num_moe_layers, dense.num_dense_layers, dense.is_moe) == (0, 36, False)


@pytest.mark.parametrize(
    ("name", "groups"), [("DeepSeek-V2", (8, 3)), ("DeepSeek-R1", (8, 4)), ("DeepSeek-V2-Lite", (1, 1)), ("Kimi-K2-Instruct", (1, 1))]
)  # fmt: skip
def test_groups_from_which_experts_are_chosen(name: str, groups: tuple[int, int]) -> None:
    moe = shape(name).moe
    assert moe is not None
    assert (moe.groups, moe.groups_per_token) == groups


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("Llama-3.1-8B", 131_072),  # 2 x 32 layers x 8 heads x 128 x 2 B
        ("Qwen2.5-7B", 57_344),  # 2 x 28 x 4 x 128 x 2
        ("DeepSeek-V3", 70_272),  # 61 x (512 + 64) x 2
        ("Kimi-K2-Instruct", 70_272),
        ("DeepSeek-V2-Lite", 31_104),  # 27 x 576 x 2
        ("Qwen3-30B-A3B", 98_304),  # 2 x 48 x 4 x 128 x 2
        ("gpt-oss-120b", 73_728),  # 2 x 36 x 8 x 64 x 2
        ("gemma-3-1b-it", 26_624),  # 2 x 26 x 1 x 256 x 2
    ],
)
def test_cache_of_a_token_in_bf16(name: str, nbytes: int) -> None:
    assert shape(name).kv_bytes_per_token(2) == nbytes
    assert shape(name).kv_bytes(100, 2) == 100 * nbytes


def test_cache_beyond_the_windows() -> None:
    # 22 layers keep 512 tokens and 4 all of 8,192: 44,032 x 2 x 256 values x 2 B.
    assert shape("gemma-3-1b-it").kv_bytes(8192, 2) == 45_088_768
    # 18 layers keep 128 and 18 all of 4,096: 76,032 x 2 x 512 values x 2 B.
    assert shape("gpt-oss-120b").kv_bytes(4096, 2) == 155_713_536
    assert shape("gpt-oss-120b").window_groups == ((0, 18), (128, 18))
    assert shape("Mistral-7B-v0.1").kv_bytes(10_000, 2) == 4096 * 131_072
    assert shape("Mistral-7B-v0.3").kv_bytes(10_000, 2) == 10_000 * 131_072
    assert shape("Mistral-7B-v0.3").window_groups == ((0, 32),)


@pytest.mark.parametrize(
    ("name", "matmuls", "at_256", "at_8192"),
    [
        # Weights of a layer: q, o 4096^2 each, k, v 4096 x 1024 each, three 4096 x 14336: 218,103,808. 32 of them and a
        # head of 128256 x 4096 make 7,504,658,432. A key costs 4 x 4096 in each of 32 layers: 524,288.
        ("Llama-3.1-8B", 15_009_316_864, 134_217_728, 4_294_967_296),
        # Attention 41,943,040, router 4096 x 8, two experts 2 x 176,160,768: 394,297,344 x 32, and 32000 x 4096.
        ("Mixtral-8x7B-v0.1", 25_497_174_016, 134_217_728, 4_294_967_296),
        # Attention 7168 x 1536 + 1536 x 24576 + 7168 x 576 + 512 x 32768 + 16384 x 7168 = 187,105,280, 61 times; three
        # dense 3 x 7168 x 18432; 58 times router 7168 x 256 and nine experts of 3 x 7168 x 2048; head 129280 x 7168:
        # 36,624,596,992. A key costs 2 x 128 x (192 + 128) in each of 61 layers: 4,997,120.
        ("DeepSeek-V3", 73_249_193_984, 1_279_262_720, 40_936_407_040),
        # Attention 2,949,120 and 3 x 1152 x 6912, 26 times, and the tied head 262144 x 1152: 999,751,680. A key costs
        # 4 x 1024 a layer: of 256 keys all are seen, of 8,192 4 layers see all and 22 see 512.
        ("gemma-3-1b-it", 1_999_503_360, 27_262_976, 180_355_072),
    ],
)  # fmt: skip
def test_operations_of_a_token(name: str, matmuls: int, at_256: int, at_8192: int) -> None:
    assert shape(name).matmul_flops_per_token == matmuls
    assert shape(name).attention_flops_per_token(256) == at_256
    assert shape(name).attention_flops_per_token(8192) == at_8192


def test_matrices_of_layers() -> None:
    v3, oss, qwen = shape("DeepSeek-V3"), shape("gpt-oss-20b"), shape("Qwen2.5-7B")
    assert v3.attention_matmuls == ((7168, 1536), (1536, 24576), (7168, 576), (512, 32768), (16384, 7168))
    assert shape("DeepSeek-V2-Lite").attention_matmuls[:2] == ((2048, 3072), (2048, 576))
    assert v3.dense_ffn_matmuls == ((7168, 18432), (7168, 18432), (18432, 7168))
    assert v3.shared_ffn_matmuls == v3.expert_matmuls == ((7168, 2048), (7168, 2048), (2048, 7168))
    assert v3.router_matmul == (7168, 256)
    assert len(v3.matmuls_per_layer) == 5 + 1 + 3 + 8 * 3
    assert (v3.attention_width, v3.value_width) == (24576, 16384)
    assert oss.attention_matmuls == ((2880, 4096), (2880, 512), (2880, 512), (4096, 2880))
    assert (oss.shared_ffn_matmuls, qwen.expert_matmuls, qwen.router_matmul) == ((), (), None)
    assert qwen.matmuls_per_layer == (
        (3584, 3584), (3584, 512), (3584, 512), (3584, 3584), (3584, 18944), (3584, 18944), (18944, 3584),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "embedding", "head", "experts", "replicated"),
    [
        # 65 norms of 4,096.
        ("Llama-3.1-8B", 525_336_576, 525_336_576, 0, 266_240),
        # 49 norms of 896.
        ("Qwen2.5-0.5B", 136_134_656, 0, 0, 43_904),
        # 58 x 256 x 44,040,192. 61 x (2 x 7168 + 1536 + 512 + 7168 x (1536 + 576)) + 58 x 7168 x 256 + 7168.
        ("DeepSeek-V3", 926_679_040, 926_679_040, 653_908_770_816, 1_030_904_832),
        # 24 x 32 x (3 x 2880^2 + 3 x 2880). 24 x (2 norms + output bias) of 2880, 24 x 32 x 2881 and a norm.
        ("gpt-oss-20b", 579_133_440, 579_133_440, 19_116_933_120, 2_422_848),
        # 4 x 26 + 1 norms of 1,152 and 26 x 2 of 256.
        ("gemma-3-1b-it", 301_989_888, 0, 0, 134_272),
    ],
)
def test_kinds_of_parameters(name: str, embedding: int, head: int, experts: int, replicated: int) -> None:
    s = shape(name)
    assert (s.embedding_parameters, s.head_parameters) == (embedding, head)
    assert (s.expert_parameters, s.replicated_parameters) == (experts, replicated)


@pytest.mark.parametrize(
    ("name", "rank", "adapters"),
    [
        # Widths of a layer: q, o 7,168, k, v 4,096, gate, up, down 22,528: 90,112 x 28 x 16.
        ("Qwen2.5-7B", 16, 40_370_176),
        ("Llama-3.1-8B", 16, 41_943_040),
        # q, o 8,192, k, v 5,120, eight experts of three 18,432: 468,992 x 32 x 8.
        ("Mixtral-8x7B-v0.1", 8, 120_061_952),
        # Attention (7168+1536) + (1536+24576) + (7168+576) + (512+32768) + (16384+7168) = 99,392, 61 times; dense
        # 3 x 25,600, 3 times; shared and 256 experts 3 x 9,216, 58 times.
        ("DeepSeek-V3", 1, 418_414_400),
    ],
)
def test_adapters(name: str, rank: int, adapters: int) -> None:
    full = shape(name)
    adapted = with_lora(full, rank)
    assert adapted.trainable_parameters == adapted.lora_parameters == adapters
    assert adapted.parameters == full.parameters == full.trainable_parameters
    assert (full.lora_parameters, with_lora(adapted, 0)) == (0, full)


@given(name=st.sampled_from(KNOWN), context=st.integers(1, 200_000))
def test_parts_and_wholes(name: str, context: int) -> None:
    s = shape(name)
    assert 0 < s.replicated_parameters < s.active_parameters <= s.parameters
    assert s.expert_parameters < s.parameters
    assert sum(layers for _, layers in s.window_groups) == s.layers == s.num_dense_layers + s.num_moe_layers
    assert s.kv_bytes(context, 2) <= context * s.kv_bytes_per_token(2)
    assert s.kv_bytes(context, 2) <= s.kv_bytes(context + 1, 2)
    full = replace(s, windows=())
    assert s.attention_flops_per_token(context) <= full.attention_flops_per_token(context)
    assert full.attention_flops_per_token(context) == context * full.attention_flops_per_token(1)
    # All a matrix holds is used twice a token; what is left of the active parameters are norms, biases and sinks.
    assert 0 <= s.active_parameters - s.matmul_flops_per_token // 2 < 0.002 * s.active_parameters


def test_a_shape_is_a_value() -> None:
    assert hash(shape("DeepSeek-V3")) == hash(shape("deepseek-ai/DeepSeek-R1"))
    assert shape_from_config(build.QWEN3_CONFIG, where="") == build.SHAPE


def test_gemma_files_that_leave_out_what_their_class_fills_in(tmp_path: Path) -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = {"model_type": "gemma3", "text_config": text | {"model_type": "gemma3_text"}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_from_config(read_config(tmp_path), where="") == shape("gemma-3-4b-it")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("Qwen3-8B", {"model_type": "mamba"}, "c: model_type: must be one of deepseek_v2, deepseek_v3, gemma2, gemma3, gemma3_text, glm4_moe, gpt_oss, kimi_k2, llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe, got 'mamba'"),
        ("Qwen3-8B", {"vocab_size": None}, "c: vocab_size: must be a positive integer, got None"),
        ("Qwen3-8B", {"head_dim": None, "hidden_size": 4097}, "c: hidden_size: must be a multiple of num_attention_heads = 32, got 4097"),
        ("DeepSeek-V3", {"kv_lora_rank": 0}, "c: kv_lora_rank: must be a positive integer, got 0"),
        ("DeepSeek-V3", {"n_routed_experts": None}, "c: n_routed_experts: must be a positive integer, got None"),
        ("DeepSeek-V3", {"n_group": 7}, "c: n_group: must divide n_routed_experts = 256, got 7"),
        ("DeepSeek-V3", {"topk_group": 9}, "c: topk_group: must not exceed n_group = 8, got 9"),
        ("DeepSeek-V3", {"first_k_dense_replace": -1}, "c: first_k_dense_replace: must be an integer of at least 0, got -1"),
        ("DeepSeek-V3", {"attention_bias": True}, "c: attention_bias: must be false: biases there are not counted, got True"),
        ("gpt-oss-20b", {"num_experts_per_tok": "4"}, "c: num_experts_per_tok: must be a positive integer, got '4'"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"] * 23}, "c: layer_types: must be full_attention or sliding_attention for each of 24 layers, got 23 of full_attention"),
        ("Qwen3-8B", {"layer_types": ["linear_attention"] * 36}, "c: layer_types: must be full_attention or sliding_attention for each of 36 layers, got 36 of linear_attention"),
        ("gemma-3-4b-it", {"text_config": {"hidden_size": 2560}}, "c: text_config: num_hidden_layers: must be a positive integer, got None"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_configuration_is_named(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        shape_from_config(known_config(name, where="") | change, where="c")
    assert str(caught.value) == message
