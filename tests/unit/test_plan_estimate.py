"""Counts behind `megatrl plan`: parameters of known models, pipelines, caches, and hints that are true."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrl.config.engines import ActorConfig, LayoutConfig
from megatrl.config.estimate.activations import chunks_in_flight, layer_bytes, pass_tokens
from megatrl.config.estimate.changes import Change, changed_recipe, is_allowed, plan_of_change, proposals
from megatrl.config.estimate.degrees import degrees_of, rank_places
from megatrl.config.estimate.generation import decode_step_seconds
from megatrl.config.estimate.hardware import CPU_CORE, GIB, GPUS, Efficiency
from megatrl.config.estimate.logits import LOGIT_BLOCK_BYTES, logit_bytes
from megatrl.config.estimate.memory import memory_plan
from megatrl.config.estimate.parameters import active_parameters, rank_parameters, total_parameters
from megatrl.config.estimate.passes import Machine, Passes, forward_operations, pass_seconds
from megatrl.config.estimate.plan import make_plan
from megatrl.config.estimate.published import comparisons, published_rows
from megatrl.config.estimate.shapes import KNOWN_SHAPES, known_shape_of
from megatrl.config.estimate.states import state_bytes
from megatrl.config.estimate.workload import workload_of
from megatrl.config.load import load_recipe
from megatrl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
LARGE = load_recipe(ROOT / "recipes/qwen3-30b-a3b-trace.yaml", require_files=False).recipe
MIXTURE = KNOWN_SHAPES["Qwen3-30B-A3B"]
H100 = Machine(hardware=GPUS["h100"], efficiency=Efficiency(), devices_per_node=8)


@pytest.mark.parametrize(
    "name, total, active",
    [
        ("Qwen3-30B-A3B", 30_532_122_624, 3_353_032_704),  # x 2 bytes = total_size of its published safetensors index
        ("Qwen3-4B", 4_022_468_096, 4_022_468_096),
        ("Qwen3-8B", 8_190_735_360, 8_190_735_360),
        ("Llama-3.1-8B", 8_030_261_248, 8_030_261_248),
    ],
)
def test_known_models_have_their_published_numbers_of_parameters(name, total, active):
    assert (total_parameters(KNOWN_SHAPES[name]), active_parameters(KNOWN_SHAPES[name])) == (total, active)


@pytest.mark.parametrize(
    "directory, name",
    [
        ("models/Qwen3-30B-A3B-Thinking-2507", "Qwen3-30B-A3B"),
        ("Qwen3-8B/", "Qwen3-8B"),
        ("/models/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("Qwen3-80B", None),
    ],
)
def test_a_directory_is_recognised_by_the_name_it_begins_with(directory, name):
    assert known_shape_of(directory) == name


def test_ranks_that_share_a_model_hold_all_of_it_once():
    layout = LayoutConfig(world_size=16, tensor=2, pipeline=2, expert=4, sequence_parallel=True)
    degrees = degrees_of(layout, MIXTURE)
    dense, expert = (sum(parts) for parts in zip(*(rank_parameters(MIXTURE, degrees, s) for s in (0, 1)), strict=True))
    whole = total_parameters(MIXTURE)
    norms = 2 * MIXTURE.hidden_size + 2 * MIXTURE.head_dim
    routers = MIXTURE.hidden_size * MIXTURE.num_experts
    repeated = MIXTURE.num_layers * (norms + routers) + MIXTURE.hidden_size  # on both tensor ranks
    assert 2 * dense - repeated + 4 * expert == whole


def test_the_shards_of_an_optimizer_add_up_to_one_whole():
    layout = LayoutConfig(world_size=8, tensor=2, expert=2, sequence_parallel=True)
    degrees = degrees_of(layout, MIXTURE)
    actor = ActorConfig(layout=layout)
    dense, expert = rank_parameters(MIXTURE, degrees, 0)
    assert (degrees.shards, degrees.expert_shards) == (4, 4)
    parts = [state_bytes(MIXTURE, degrees, actor, stage=0, shard=i, expert_shard=i) for i in range(4)]
    assert sum(part.moments for part in parts) == 8 * (dense + expert)
    assert sum(part.master for part in parts) == 4 * (dense + expert)


@pytest.mark.parametrize(
    "pipeline, virtual, microbatches, first_stage, last_stage",
    [(1, 1, 8, 1, 1), (4, 1, 8, 4, 1), (4, 1, 2, 2, 1), (4, 2, 8, 11, 5), (2, 3, 8, 7, 5)],
)
def test_passes_in_flight_follow_the_schedule(pipeline, virtual, microbatches, first_stage, last_stage):
    degrees = degrees_of(LayoutConfig(world_size=pipeline, pipeline=pipeline, virtual_pipeline=virtual), MIXTURE)
    assert chunks_in_flight(degrees, 0, microbatches) == first_stage
    assert chunks_in_flight(degrees, pipeline - 1, microbatches) == last_stage


def test_every_rank_has_a_place_of_its_own():
    layout = LayoutConfig(world_size=16, tensor=2, pipeline=2, context=2, expert=4, sequence_parallel=True)
    places = rank_places(degrees_of(layout, MIXTURE), 8)
    assert len({(p.tensor, p.context, p.data, p.pipeline) for p in places}) == 16
    assert len({(p.expert_tensor, p.expert, p.expert_data, p.pipeline) for p in places}) == 16
    assert [(p.node, p.device) for p in places] == [(rank // 8, rank % 8) for rank in range(16)]


@pytest.mark.parametrize("kernels", ["local", "fused"])
def test_recomputation_keeps_less(kernels):
    degrees = degrees_of(LayoutConfig(), MIXTURE)
    tokens = pass_tokens(MIXTURE, degrees, 4096)
    none, selective, full = (
        layer_bytes(MIXTURE, degrees, "bf16", tokens, kernels=kernels, recompute=mode)
        for mode in ("none", "selective", "full")
    )
    assert none > selective > full == 4096 * 2048 * 2


def test_logits_stop_growing_at_their_block():
    degrees = degrees_of(LayoutConfig(), MIXTURE)
    tokens = pass_tokens(MIXTURE, degrees, 65536)
    few, many, twice = (
        logit_bytes(MIXTURE, degrees, "bf16", tokens, rows, with_gradient=False) for rows in (100, 30000, 60000)
    )
    assert few < many < 5 * LOGIT_BLOCK_BYTES
    assert twice - many == 30000 * MIXTURE.hidden_size * 2  # only the rows' hidden states


def test_operations_of_a_token_agree_with_the_published_count():
    card = published_rows()["pretraining"][0]
    published = card["model_tflops_per_gpu"] * 1e12 / card["tokens_per_s_per_gpu"] / 3
    assert forward_operations(MIXTURE, attended=card["sequence_tokens"] / 2) == pytest.approx(published, rel=0.01)


def test_a_decode_step_reads_more_experts_the_more_sequences_there_are():
    one, many = (
        decode_step_seconds(MIXTURE, "bf16", H100, tensor=1, batch=batch, context=1, cache_token_bytes=1)
        for batch in (1, 256)
    )
    assert many > 4 * one


def test_more_stages_wait_longer_in_a_bubble():
    passes = Passes(num_packs=4, tokens=4096, attended=2048, rows=2048, with_backward=True)
    bubbles = [
        pass_seconds(MIXTURE, degrees_of(LayoutConfig(world_size=8, pipeline=p), MIXTURE), "bf16", H100, passes).bubble
        for p in (1, 2, 4)
    ]
    assert bubbles[0] == 0 < bubbles[1] < bubbles[2]


def test_a_large_recipe_fits_an_h200_and_not_an_h100():
    assert make_plan(LARGE, gpu="h200", host_memory=0).fits
    plan = make_plan(LARGE, gpu="h100", host_memory=0)
    assert not plan.fits
    assert "key-value cache holds 0 tokens" in plan.memory.problems[-1]
    assert plan.proposals


@settings(max_examples=12, deadline=None)
@given(
    gpu=st.sampled_from(["h100", "a100", "h200"]),
    microbatch_tokens=st.sampled_from([16384, 131072, 524288]),
    recompute=st.sampled_from(["none", "full"]),
    context_tokens=st.sampled_from([16384, 32768]),
    placement=st.sampled_from(["separate", "colocated"]),
)
def test_every_hint_makes_the_recipe_fit(gpu, microbatch_tokens, recompute, context_tokens, placement):
    recipe = changed_recipe(
        LARGE,
        {
            "batch.microbatch_tokens": microbatch_tokens,
            "actor.recompute": recompute,
            "rollout.context_tokens": context_tokens,
            "placement.kind": placement,
        },
    )
    assert recipe is not None
    workload = workload_of(recipe)
    before = memory_plan(recipe, MIXTURE, workload, GPUS[gpu], host_memory=0)
    if before.fits:
        return
    for hint in proposals(recipe, MIXTURE, workload, GPUS[gpu], host_memory=0):
        changed = changed_recipe(recipe, hint.change.values)
        assert changed is not None
        assert is_allowed(changed)
        again = memory_plan(changed, MIXTURE, workload_of(changed), GPUS[gpu], host_memory=0)
        assert again.fits
        assert all(phase.total <= phase.limit for phase in again.phases)


def test_a_change_that_the_layout_refuses_is_no_hint():
    workload = workload_of(LARGE)
    change = Change(values={"actor.layout.expert": 7}, distance=1.0)
    assert plan_of_change(LARGE, change, MIXTURE, workload, GPUS["h200"], host_memory=0) is None


def test_a_cpu_recipe_shares_the_memory_of_its_host():
    recipe = load_recipe(ROOT / "recipes/evidence_hunt.yaml").recipe
    assert make_plan(recipe, host_memory=16 * GIB).fits
    tight = make_plan(recipe, host_memory=1 * GIB)
    assert {phase.pool for phase in tight.memory.phases} == {"host"}
    assert len(tight.memory.problems) == 4


def test_an_impossible_layout_is_refused_with_its_reasons():
    recipe = changed_recipe(LARGE, {"actor.layout.expert": 7})
    assert recipe is not None  # the model's files are not here, so no rule could compare
    with pytest.raises(ConfigError, match=r"layout\.expert"):
        make_plan(recipe, host_memory=0)


def test_a_model_that_nobody_knows_asks_for_a_shape():
    recipe = changed_recipe(LARGE, {"model.path": "models/other"})
    assert recipe is not None
    with pytest.raises(ConfigError, match="--shape"):
        make_plan(recipe, host_memory=0)
    assert make_plan(recipe, host_memory=0, shape_name="Qwen3-30B-A3B").num_parameters == total_parameters(MIXTURE)


def test_calibration_rows_are_met_and_every_published_row_is_on_the_page():
    rows = comparisons()
    assert {row.use for row in rows} == {"calibration", "test", "other precision"}
    assert max(abs(row.deviation) for row in rows if row.use == "calibration") < 0.05
    page = (ROOT / "docs/plan.md").read_text()
    for row in rows:
        numbers = f"{row.published:.0f} | {row.predicted:.0f} | {row.deviation:+.0%}"
        line = f"| {row.name} | {row.settings} | {row.unit} | {numbers} | {row.use} |"
        assert line in page, f"docs/plan.md lacks: {line}"


def test_peak_memory_is_within_what_was_published():
    (row,) = [row for row in comparisons() if row.unit.startswith("GiB")]
    assert 0.85 * row.published < row.predicted < row.published


def test_a_host_without_a_gpu_is_never_faster_than_one_with():
    slow = replace(H100, hardware=CPU_CORE)
    passes = Passes(num_packs=1, tokens=4096, attended=2048, rows=10)
    degrees = degrees_of(LayoutConfig(), MIXTURE)
    times = [pass_seconds(MIXTURE, degrees, "bf16", machine, passes).total for machine in (H100, slow)]
    assert times[0] < times[1]
