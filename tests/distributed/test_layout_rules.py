"""Our rules for layouts against Megatron's own: what it accepts, and which layers it then builds where."""

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatrl.config.engines import LayoutConfig, TinyModel
from megatrl.config.model_shape import ModelShape, tiny_model_shape
from megatrl.config.pipeline import pipeline_chunks
from megatrl.config.plan import check_layout, expert_tensor_degree
from megatrl.errors import LayoutError
from megatrl.mcore.layout import Layout
from megatrl.mcore.model import pipeline_options

MIXTURE = replace(tiny_model_shape(TinyModel(), vocab_size=100), num_heads=8, num_kv_heads=2, num_layers=4)

ALONE = Layout(
    world_size=1, tensor=1, pipeline=1, expert=1, expert_tensor=1, data=1, sequence_parallel=False, device="cpu",
    rank=0, tensor_rank=0, pipeline_rank=0, expert_rank=0, data_rank=0,
)  # fmt: skip


def megatron_config(shape: ModelShape, **degrees: Any) -> TransformerConfig:
    """Raises ValueError or AssertionError where Megatron refuses the degrees."""
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_size,
        num_moe_experts=shape.num_experts or None,
        moe_ffn_hidden_size=shape.expert_ffn_size or None,
        add_bias_linear=False,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=True,
        **degrees,
    )


def megatron_layers(num_layers: int, *, pipeline: int, virtual: int, first: int | None, last: int | None) -> Any:
    """Returns layers[stage][chunk] as Megatron would build them; raises where it refuses."""
    layout = {"pipeline": pipeline, "virtual_pipeline": virtual, "first_stage_layers": first, "last_stage_layers": last}
    config = megatron_config(
        replace(MIXTURE, num_layers=num_layers),
        pipeline_model_parallel_size=pipeline,
        **pipeline_options(replace(ALONE, **layout)),
        pipeline_dtype=None if pipeline == 1 else torch.float32,
    )
    chunks = []
    for stage in range(pipeline):
        of_stage = []
        for chunk in range(virtual):
            vp_stage = chunk if virtual > 1 else None
            start = get_transformer_layer_offset(config, vp_stage, stage)
            of_stage.append(range(start, start + get_num_layers_to_build(config, vp_stage, stage)))
        chunks.append(tuple(of_stage))
    return tuple(chunks)


def test_megatron_builds_exactly_the_layers_that_our_split_gives_each_chunk() -> None:
    num_equal = num_refused_by_both = 0
    sizes = (None, 1, 2, 4)
    for layers, pipeline, virtual, first, last in product((2, 4, 6, 7, 8), (1, 2, 3, 4), (1, 2), sizes, sizes):
        split = {"pipeline": pipeline, "virtual": virtual, "first": first, "last": last}
        try:
            ours = pipeline_chunks(layers, **split)
        except LayoutError:
            ours = None
        try:
            theirs = megatron_layers(layers, **split)
        except (ValueError, AssertionError, RuntimeError, ZeroDivisionError):
            theirs = None
        if ours is not None:
            assert theirs == ours, (layers, split)
            num_equal += 1
        elif theirs is None:
            num_refused_by_both += 1
        elif not (pipeline == 2 and first and last):  # there Megatron is told `first` alone, see pipeline_options
            # what makes no sense with one stage, or would silently be another model
            passed = [layer for chunk in range(virtual) for stage in theirs for layer in stage[chunk]]
            assert pipeline == 1 or passed != list(range(layers)), (layers, split, theirs)
    assert num_equal > 50
    assert num_refused_by_both > 50


def test_interleaved_stages_never_use_megatrons_default_exchange() -> None:
    # Where each of two stages is both neighbours of the other, passes over unequal lengths do not end with the default.
    options = pipeline_options(replace(ALONE, pipeline=2, virtual_pipeline=2))
    assert (options["overlap_p2p_comm"], options["batch_p2p_comm"]) == (True, False)
    default = megatron_config(MIXTURE)
    assert (default.overlap_p2p_comm, default.batch_p2p_comm) == (False, True)


GRID: dict[str, tuple[Any, ...]] = {
    "world_size": (1, 2, 4, 6, 8),
    "tensor": (1, 2, 3, 4, 8),
    "pipeline": (1, 2, 4),
    "context": (1, 2),
    "expert": (1, 2, 4, 3),
    "expert_tensor": (None, 1, 2),
}


def test_a_layout_passes_our_rules_exactly_where_megatron_takes_it() -> None:
    counts = {True: 0, False: 0}
    for values in product(*GRID.values()):
        degrees = dict(zip(GRID, values, strict=True))
        layout = LayoutConfig(**degrees, sequence_parallel=degrees["tensor"] > 1)
        is_taken = megatron_takes(layout)
        assert (check_layout(layout, MIXTURE) == []) == is_taken, degrees
        counts[is_taken] += 1
    assert min(counts.values()) > 50, counts


def megatron_takes(layout: LayoutConfig) -> bool:
    """Its configuration, its rank grids (as `initialize_model_parallel` builds them) and its divisions into parts."""
    shape, tensor, experts = MIXTURE, layout.tensor, expert_tensor_degree(layout)
    dense_size, expert_size = tensor * layout.pipeline * layout.context, experts * layout.expert * layout.pipeline
    if layout.world_size % dense_size or layout.world_size % expert_size:
        return False
    grids = [
        RankGenerator(tp=tp, ep=ep, dp=layout.world_size // size, pp=layout.pipeline, cp=cp, order="tp-cp-ep-dp-pp")
        for tp, ep, cp, size in (
            (tensor, 1, layout.context, dense_size),
            (experts, layout.expert, 1, expert_size),
        )
    ]
    if grids[0].get_ranks("pp") != grids[1].get_ranks("pp"):
        return False
    try:
        megatron_config(
            shape,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=layout.pipeline,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=experts,
            sequence_parallel=layout.sequence_parallel,
            pipeline_dtype=torch.float32,
        )
    except (ValueError, AssertionError):
        return False
    qkv_rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    parts = ((qkv_rows, tensor), (shape.expert_ffn_size, experts), (shape.num_experts, layout.expert))
    return all(size % degree == 0 for size, degree in parts) and shape.num_layers % layout.pipeline == 0
