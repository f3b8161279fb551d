"""Products that make gradients, quantising, what is spared, and how rows of tables are read into them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from training_files import automodel, bridge, dgxc
from training_rows import Record, Row, clocks, gpt, machine, step_seconds
from training_sharded import prime

from analytic.backward import both_ways
from analytic.exchange import distinct
from analytic.fit import machine_of
from analytic.kernels import gemm_seconds, narrow_seconds
from analytic.layers import Spread, Work, around, divided, matrices, spread_of
from analytic.priors import priors
from analytic.products import Made, ending_seconds, gradients, products
from analytic.spread import Routing
from analytic.stages import dispatch_seconds
from analytic.training import training
from analytic.update import made
from ir.shape import Moe
from ir.systems import load_cluster, system

GPT = gpt(layers=24, hidden=4096, heads=32, ffn=11008, vocab=32000)
ROW = Row(
    framework="test",
    gpu="h100",
    num_gpus=8,
    shape=GPT,
    seq_len=4096,
    global_batch=64,
    micro_batch=1,
    seconds=1.0,
    recompute="none",
)
TOKENS = np.array([4096.0])


def spread(**changed: int) -> Spread:
    row = replace(ROW, **changed)  # type: ignore[arg-type]
    return spread_of(row.columns(), np.array([row.dp]))


def how(pieces: float = 1.0, output_bytes: float = 4.0) -> Made:
    return Made(pieces=np.array([pieces]), output_bytes=np.array([output_bytes]))


def test_a_product_reads_and_writes_the_sums_that_it_adds_to() -> None:
    """A device without a table: six bytes a value more than a bfloat16 output takes."""
    mi = machine_of(system("mi300x", 8, where="test").groups[0])
    gemm = mi.device.gemm
    assert gemm is not None
    m, k, n = 8192.0, 2048.0, 4096.0
    plain = float(gemm_seconds(mi, np.array([m]), k, n)[0])
    wider = float(gemm_seconds(mi, np.array([m]), k, n, output_bytes=8.0)[0])
    assert wider - plain == pytest.approx(6.0 * m * n / gemm.bandwidth)


def test_inputs_that_lie_quantised_save_2_ps_a_value() -> None:
    h100 = machine("h100", 8)
    whole, rest = gemm_seconds(h100, TOKENS, 8192.0, 8192.0, "fp8"), narrow_seconds(h100, TOKENS, 8192.0, 8192.0)
    assert whole[0] - rest[0] == pytest.approx(2.2e-12 * 4096 * 8192)
    # Of a narrow product that would leave less than its arithmetic takes at the peak of the data sheet.
    narrow = narrow_seconds(h100, TOKENS, 8192.0, 64.0)
    assert narrow[0] >= 2.0 * 4096 * 8192 * 64 / 1979e12


def test_gradients_are_products_of_their_own_shapes() -> None:
    h100, at = machine("h100", 8), spread()
    found = gradients(h100, GPT, at, TOKENS, how(output_bytes=8.0))
    inputs = weights = 0.0
    for count, cuts in matrices(h100, GPT):
        for (k, n), _ in cuts:
            inputs += count * float(gemm_seconds(h100, TOKENS, float(n), float(k))[0])
            weights += count * float(gemm_seconds(h100, np.array([float(n)]), TOKENS, float(k), output_bytes=8.0)[0])
    assert found.inputs[0] == pytest.approx(inputs)
    assert found.weights[0] == pytest.approx(weights)
    assert found.scaled[0] == 0.0


def test_small_micro_batches_pay_for_the_sums() -> None:
    """Twice the tokens take less than twice as long to make gradients of weights; all but traffic is proportional."""
    h100, at = machine("h100", 8), spread()
    one, two = (gradients(h100, GPT, at, n * TOKENS, how(output_bytes=8.0)).weights[0] for n in (0.25, 0.5))
    assert 1.4 * one < two < 1.95 * one


def test_fp8_quantises_each_tensor_once() -> None:
    """By hand: 24 layers read in two bytes and write in two, at 3.35 TB/s less what a device's copies reach."""
    h100, at = machine("h100", 8), replace(spread(), fp8=np.array([True]))
    _, scaled = products(h100, GPT, at, TOKENS, how())
    back = gradients(h100, GPT, at, TOKENS, how()).scaled
    each = 4.0 * 4096 * 24 / h100.device.memory_bandwidth
    assert scaled[0] == pytest.approx(each * (4096 + 4096 + 4096 + 11008))
    assert back[0] == pytest.approx(each * (3 * 4096 + 4096 + 2 * 11008 + 4096))
    assert products(h100, GPT, spread(), TOKENS, how())[1][0] == 0.0
    a100 = machine("a100", 8)
    assert products(a100, GPT, at, TOKENS, how())[1][0] == 0.0, "has no products in fp8"


def test_pieces_are_smaller_products() -> None:
    h100, at = machine("h100", 8), spread(tp=8)
    whole, cut = (products(h100, GPT, at, TOKENS, how(pieces=n))[0][0] for n in (1.0, 8.0))
    by_hand = 0.0
    for count, cuts in matrices(h100, GPT):
        for matrix, kind in cuts:
            k, n = divided(at, matrix, kind)
            by_hand += 8 * count * float(gemm_seconds(h100, TOKENS / 8, k, n)[0])
    assert cut == pytest.approx(by_hand)
    assert cut > 1.05 * whole


def test_how_a_trainer_makes_products() -> None:
    """Only userbuffers cut products up, and only under tensor parallelism; ZeRO-3 adds to nothing."""
    trainers = training().trainers
    zero = np.array([1], dtype=np.int32)
    assert made(spread(tp=8), zero, trainers["userbuffers"]).pieces[0] == 8
    assert made(spread(), zero, trainers["userbuffers"]).pieces[0] == 1
    assert made(spread(tp=8), zero, trainers["flash"]).pieces[0] == 1
    assert made(spread(), zero, trainers["flash"]).output_bytes[0] == 8
    assert made(spread(), zero, trainers["userbuffers"]).output_bytes[0] == 4
    assert made(spread(), zero + 2, trainers["flash"]).output_bytes[0] == 2


def test_fully_sharded_layers_do_not_compute_their_last_product_again() -> None:
    h100, full = machine("h100", 8), replace(ROW, recompute="full", zero=3)
    ending = float(ending_seconds(h100, GPT, spread(), TOKENS, how())[0])
    assert ending == pytest.approx(24 * float(gemm_seconds(h100, TOKENS, 11008.0, 4096.0)[0]))
    again = step_seconds(full)["compute"] - step_seconds(replace(full, recompute="none"))["compute"]
    forward = float(products(h100, GPT, spread(), TOKENS, how())[0][0])
    attention = float(around(h100, GPT, spread(), work()).attention[0])
    assert again == pytest.approx(8 * training().loaded["hopper"] * (forward + attention - ending))


def work(sequences: float = 1.0) -> Work:
    tokens = sequences * TOKENS
    return Work(tokens=tokens, squares=tokens * 4096.0, head_tokens=tokens)


def test_a_core_makes_each_gradient_in_a_forward_pass() -> None:
    """What `calibrate` assumes when it scales whole passes."""
    host = machine_of(load_cluster("examples/arithmetic/cluster.toml").groups[0])
    at = spread()
    one, late = both_ways(host, GPT, at, work(), None, how())
    assert priors().backward_ratio == 2.0
    assert late.inputs + late.weights + late.memory == pytest.approx(2.0 * one.linear)
    assert late.head_inputs + late.head_weights == pytest.approx(2.0 * one.head)
    assert late.ending[0] == 0.0


def test_collectives_of_layers_with_experts() -> None:
    """A layer's attention needs one all-reduce or what is the same; experts that are whole none, divided ones as many
    as a token has experts, shared ones one."""
    h100 = machine("h100", 8)
    dense = around(h100, GPT, spread(tp=4), work()).tensor[0]
    for etp, shared, times in ((1, 0, 1), (4, 0, 3), (1, 1024, 2), (4, 1024, 4)):
        shape = replace(GPT, moe=Moe(experts=8, experts_per_token=2, ffn=1024, shared_ffn=shared))
        found = around(h100, shape, spread(tp=4, etp=etp), work()).tensor[0]
        assert found == pytest.approx(dense * times / 2), (etp, shared)
    engine = around(h100, replace(GPT, moe=Moe(experts=8, experts_per_token=2, ffn=1024)), spread(tp=4), work(),
                    Routing(engine=True)).tensor[0]  # fmt: skip
    assert engine > 0


def test_tokens_of_divided_experts_cross_nodes() -> None:
    """Eight groups of experts are a node's devices; with every expert on four of them they are on four nodes."""
    shape, far = replace(GPT, moe=Moe(experts=8, experts_per_token=2, ffn=1024)), machine("h100", 64)
    sent = np.array([1.0])
    inside, across = (
        dispatch_seconds(far, shape, spread(num_gpus=64, tp=4, ep=8, etp=etp), TOKENS, sent)[0] for etp in (1, 4)
    )
    assert across > 3 * inside


def record(**columns: str) -> Record:
    names = ["seq_len", "tp", "pp", "vp", "cp", "ep", "etp", "layers", "fsdp_shard", "grad_accum", "tokens_per_s_per_gpu", "fsdp", "preset_tag", "alt", "preset_cuda_graph", "preset_moe_a2a_overlap", "preset_cpu_offload_layers", "kernels"]  # fmt: skip
    return (
        dict.fromkeys(names, "") | {"gpu": "H100", "seq_len": "4096", "micro_batch": "1", "precision": "BF16"} | columns
    )


def row_of(found: Row | str) -> Row:
    assert isinstance(found, Row), found
    return found


def test_a_batch_that_replicas_cannot_share_is_a_misprint() -> None:
    r = record(
        workload="nemo_megatron", task="pretrain", tag="v25.04", model="NeMo Megatron BF16", num_gpus="512", tp="4",
        pp="8", vp="6", global_batch="1204", grad_accum="64", step_time_s="8.42", seq_len="2048",
    )  # fmt: skip
    assert row_of(dgxc(r)).global_batch == 1024
    assert row_of(dgxc(r | {"global_batch": "2048", "grad_accum": "64"})).global_batch == 2048


def test_fine_tuning_rows_are_packed() -> None:
    r = record(
        workload="ft_llama3", tag="v25.04", model="Llama3 8b  SFT BF16", num_gpus="8", global_batch="32",
        step_time_s="1.32", task="SFT",
    )  # fmt: skip
    packed, plain = row_of(dgxc(r)), row_of(dgxc(r | {"task": "pretrain"}))
    assert (packed.samples, plain.samples) == (22, 1)
    assert int(packed.columns()["micro_batch"][0]) == 22 and int(packed.batch.count[0]) == 4 * 22
    assert packed.batch.lengths.mean == pytest.approx(4096 / 22)
    assert sum(step_seconds(packed).values()) < 0.97 * sum(step_seconds(plain).values())
    lora = record(container="26.02", phase="lora", model="LLAMA3_70B", num_gpus="8", global_batch="32",
                  step_time_s_derived="5", tp="2", pp="4", vp="20")  # fmt: skip
    assert row_of(bridge(lora)).samples == 22


def test_what_recipes_of_nemo_say() -> None:
    grok = record(
        workload="grok1", task="pretrain", tag="v24.11.1", model="Grok 1 314b BF16", num_gpus="512", tp="4", pp="8",
        vp="8", cp="2", ep="8", global_batch="1024", step_time_s="20.83", seq_len="8192",
    )  # fmt: skip
    old, new = row_of(dgxc(grok)), row_of(dgxc(grok | {"tag": "v25.05.01", "etp": "1"}))
    assert (old.etp, old.imbalance, old.attention_limit) == (4, 1.0, 350e12)
    assert (new.etp, new.imbalance, new.attention_limit) == (1, 1.0, None)


def test_experts_in_turn_lie_on_few_devices() -> None:
    r = record(task="pretrain", model="DeepSeek V3 671B", num_gpus="256", global_batch="512", pp="4", ep="64", vp="8",
               step_time_s="8.18", kernels="TE + DeepEP", fsdp="64")  # fmt: skip
    row = row_of(automodel(r))
    assert row.recompute == "full"
    assert row.exchanged == pytest.approx(2 / distinct(64, 8)), "four experts a device, eight a token"
    assert 1.0 - row.traits.expert_overlap == pytest.approx(row.exchanged)


def test_experts_with_adapters_go_one_by_one_off_hopper() -> None:
    """128 experts, each as many launches as an interpreted layer, which are 14.6 fused ones."""
    r = record(
        model="Qwen/Qwen3-30B-A3B-Instruct-2507", lora_rank="16", gpu="NVIDIA B200", num_gpus="8", seq_len="16384",
        micro_batches="2", activation="Recompute", attention="flash_attention_2", ep="1", cp="1", type="sft",
        step_time_s_mean="28.3",
    )  # fmt: skip
    looped, hopper = row_of(prime(r)), row_of(prime(r | {"gpu": "NVIDIA H100 80GB HBM3"}))
    assert looped.traits.expert_launches == pytest.approx(128 * 14.6)
    assert hopper.traits.expert_launches == 60
    # 48 layers, two micro-batches, and for each expert zeros as large as all sorted tokens, four times.
    zeros = 48 * 2 * 128 * 4 * (2 * 16384 * 8 * 2048) / machine("b200", 8).device.memory_bandwidth
    assert looped.beside == pytest.approx(zeros)
    assert (hopper.beside, row_of(prime(r | {"lora_rank": ""})).beside) == (0.0, 0.0)


def test_biases_of_experts_before_they_were_fused() -> None:
    """By hand: 36 layers, 4 copies of a token, 68 bytes for a value of 2,880 and 26 for each of twice as many."""
    r = record(container="26.04", phase="pretrain", model="GPT OSS 120B", gpu="GB200", num_gpus="64", ep="64",
               global_batch="1280", micro_batch="4", step_time_s_derived="5.1")  # fmt: skip
    each = 1280 * 4096 * 4 * 36 / 64 * (68 * 2880 + 26 * 2 * 2880)
    assert row_of(bridge(r)).beside == pytest.approx(each / machine("gb200", 64).device.memory_bandwidth)
    assert row_of(bridge(r | {"container": "26.06"})).beside == 0.0


def test_clocks_go_with_the_cube_root_of_power() -> None:
    assert clocks("h100@500") == pytest.approx((500 / 700) ** (1 / 3))
    assert clocks("h100") == 1.0
    whole, capped = machine("h100", 8), machine("h100@500", 8)
    m = np.array([8192.0])
    slower = gemm_seconds(capped, m, 8192.0, 8192.0)[0] / gemm_seconds(whole, m, 8192.0, 8192.0)[0]
    assert slower == pytest.approx((700 / 500) ** (1 / 3), rel=0.02)
    assert capped.device.memory_bandwidth == whole.device.memory_bandwidth
