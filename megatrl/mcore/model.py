"""Qwen3, Qwen3-MoE and Llama-3 as Megatron GPT models; the last stage ends in hidden states, not logits."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatrl.config.engines import Precision, RouterConfig
from megatrl.config.model_shape import ModelShape
from megatrl.config.pipeline import Chunks
from megatrl.errors import LayoutError
from megatrl.mcore.attention import PackedCausalAttention
from megatrl.mcore.forest import ForestSequences, forest_capable
from megatrl.mcore.layout import Layout
from megatrl.mcore.norm import RMSNorm
from megatrl.mcore.routing import PackedRouter, attach_routing, needs_rows

Recompute = Literal["none", "full", "selective"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class CausalModel(GPTModel):
    """A GPTModel whose last stage returns the final hidden states instead of all logits.

    Only the positions that carry weight are projected to the vocabulary, in `mcore/logprobs.py`: the
    full [T, vocabulary] logits of a multi-turn pack would not fit. `shape` says what it was built from,
    `chunks` which layers every stage and chunk of the whole pipeline holds, `layers` which are in this one.
    """

    shape: ModelShape
    chunks: Chunks
    layers: range

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    def _preprocess(self, *arguments: Any, packed_seq_params: Any = None, **options: Any) -> Any:
        """The rows of a forest have the rotary positions of their own paths."""
        outputs = super()._preprocess(*arguments, packed_seq_params=packed_seq_params, **options)
        if not isinstance(packed_seq_params, ForestSequences):
            return outputs
        decoder_input, rotary, *rest = outputs
        assert rotary is not None, "our models have rotary embeddings on every stage"
        return (decoder_input, rotary.index_select(0, packed_seq_params.positions), *rest)

    def output_weight(self) -> Tensor:
        """Returns this tensor rank's rows of the output projection, [padded vocabulary / TP, hidden]."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        weight = self.output_layer.weight
        assert weight is not None, "only a tied model's output layer has no weight of its own"
        return weight


def padded_vocab_size(shape: ModelShape, tensor: int) -> int:
    """Returns the rows of embedding and output layer: vocab_size rounded up to a multiple of TP."""
    return math.ceil(shape.vocab_size / tensor) * tensor


def build_model(
    shape: ModelShape,
    layout: Layout,
    *,
    precision: Precision,
    recompute: Recompute = "none",
    router: RouterConfig | None = None,
) -> list[torch.nn.Module]:
    """Returns this rank's model chunks, first to last, with weights that still have to be loaded.

    bf16 models are bf16 throughout, without Megatron's Float16Module: that wrapper only casts inputs and
    outputs, which are token ids and hidden states here. Master weights are the optimizer's.
    """
    router = router or RouterConfig()
    config = transformer_config(shape, layout, precision=precision, recompute=recompute, router=router)
    models: list[torch.nn.Module] = []
    for chunk in range(layout.virtual_pipeline):
        model = _build_chunk(config, shape, layout, chunk, router)
        model.rotary_pos_emb.inv_freq = rope_frequencies(shape)
        for name, parameter in model.named_parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            if ".experts." in name:
                # Megatron's own mark is missing with one expert rank: experts would then share the dense buffers,
                # be summed over the wrong ranks where they are whole under TP, and have another optimizer than with
                # several.
                parameter.allreduce = False  # type: ignore[attr-defined]
        models.append(model.to(device=layout.torch_device, dtype=DTYPES[precision]))
    return models


def _build_chunk(
    config: TransformerConfig, shape: ModelShape, layout: Layout, chunk: int, router: RouterConfig
) -> CausalModel:
    chunks = layout.chunks(shape.num_layers)
    layers = chunks[layout.pipeline_rank][chunk]
    model = CausalModel(
        config,
        _block_spec(config, shape, layout, router, num_layers=len(layers)),  # type: ignore[arg-type]  # accepted, too
        vocab_size=padded_vocab_size(shape, layout.tensor),
        max_sequence_length=shape.max_positions,
        pre_process=layout.is_first_stage and chunk == 0,
        post_process=layout.is_last_stage and chunk == layout.virtual_pipeline - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,  # type: ignore[arg-type]  # annotated int, used as a float
        vp_stage=chunk if layout.virtual_pipeline > 1 else None,
    )
    model.shape, model.chunks, model.layers = shape, chunks, layers
    built: list[Any] = list(model.decoder.layers)
    numbered = [layer.layer_number - 1 for layer in built]  # what checkpoints are written under
    if numbered != list(layers):
        raise LayoutError(
            f"stage {layout.pipeline_rank}, chunk {chunk} was meant to hold the layers {list(layers)} but Megatron "
            f"numbers them {numbered}; megatron-core has changed how it splits a pipeline"
        )
    if shape.is_mixture and needs_rows(router):
        attach_routing(list(model.decoder.layers), config.recompute_modules or ())
    return model


def unwrap(model: torch.nn.Module) -> CausalModel:
    """Returns the CausalModel inside DistributedDataParallel."""
    while not isinstance(model, CausalModel):
        model = model.module  # type: ignore[assignment]
    return model


def shape_of(models: Sequence[torch.nn.Module]) -> ModelShape:
    return unwrap(models[0]).shape


def transformer_config(
    shape: ModelShape, layout: Layout, *, precision: Precision, recompute: Recompute, router: RouterConfig
) -> TransformerConfig:
    """Returns Megatron's configuration of a shape on a layout.

    Fused kernels are on only on CUDA. `calculate_per_token_loss` keeps Megatron from dividing gradients by
    microbatches or data ranks: the loss already carries its global denominator. Auxiliary losses are not
    Megatron's, which depend on how sequences are packed, but `mcore/routing.py`'s.
    """
    on_cuda = layout.device == "cuda"
    options = _mixture_options(shape, router, on_cuda=on_cuda)
    options |= _recompute_options(recompute) | pipeline_options(layout)
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.has_qk_norm,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=DTYPES[precision],
        pipeline_dtype=DTYPES[precision],
        bf16=precision == "bf16",
        use_cpu_initialization=not on_cuda,
        perform_initialization=True,
        bias_activation_fusion=on_cuda,
        bias_dropout_fusion=on_cuda,
        masked_softmax_fusion=False,
        apply_rope_fusion=on_cuda,
        gradient_accumulation_fusion=False,  # needs Apex
        persist_layer_norm=False,
        batch_p2p_sync=on_cuda,
        variable_seq_lengths=True,
        calculate_per_token_loss=True,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        sequence_parallel=layout.sequence_parallel,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths asks for it even in a dense model
        **options,
    )


def _mixture_options(shape: ModelShape, router: RouterConfig, *, on_cuda: bool) -> dict[str, Any]:
    if not shape.is_mixture:
        return {}
    return {
        "num_moe_experts": shape.num_experts,
        "moe_router_topk": shape.num_experts_per_token,
        "moe_ffn_hidden_size": shape.expert_ffn_size,
        "moe_router_load_balancing_type": "none",
        # top-k first, then softmax over the chosen logits = softmax first, then renormalise
        "moe_router_pre_softmax": not shape.norm_topk_prob,
        "moe_router_dtype": "fp32" if router.precision == "fp32" else None,
        "moe_router_enable_expert_bias": router.expert_bias_update_rate > 0,
        "moe_router_bias_update_rate": router.expert_bias_update_rate,
        "moe_grouped_gemm": on_cuda,
        "moe_permute_fusion": on_cuda,
    }


def pipeline_options(layout: Layout) -> dict[str, Any]:
    """Returns the fields of Megatron's configuration that say how layers are split and hidden states exchanged."""
    first, last = layout.first_stage_layers, layout.last_stage_layers
    if layout.pipeline == 2 and first is not None:
        last = None  # it follows; with both and no stage between, Megatron 0.16.1 divides by zero
    options: dict[str, Any] = {
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
    }
    if layout.virtual_pipeline > 1:
        # With two stages each is both neighbours of the other. With Megatron's default (batched) exchange, passes over
        # sequences of unequal length did not come to an end here.
        options |= {
            "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    return options


def _recompute_options(recompute: Recompute) -> dict[str, Any]:
    if recompute == "none":
        return {}
    if recompute == "selective":
        return {"recompute_granularity": "selective"}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def rope_frequencies(shape: ModelShape) -> Tensor:
    """Returns the rotary frequencies, [head_dim / 2] fp32, exactly as transformers computes them.

    Megatron's own scaling fixes low_freq_factor, high_freq_factor and original positions at 1, 4 and
    8192, so the values of other checkpoints would silently be ignored.
    """
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
    frequencies = 1.0 / (shape.rope_theta**exponent)
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_positions / scaling.low_freq_factor
    shortest = scaling.original_max_positions / scaling.high_freq_factor
    scaled = torch.where(wavelengths > longest, frequencies / scaling.factor, frequencies)
    blend = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smoothed = (1 - blend) * scaled / scaling.factor + blend * scaled
    return torch.where((wavelengths >= shortest) & (wavelengths <= longest), smoothed, scaled)


def _block_spec(
    config: TransformerConfig, shape: ModelShape, layout: Layout, router: RouterConfig, *, num_layers: int
) -> TransformerBlockSubmodules:
    num_experts = shape.num_experts or None
    if layout.device == "cuda":  # not run in this project's tests
        from megatron.core.extensions.transformer_engine import TENorm

        layer: Any = get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts, moe_grouped_gemm=shape.is_mixture, qk_layernorm=config.qk_layernorm
        )
        norm: Any = TENorm
    else:
        layer = get_gpt_layer_local_spec(
            num_experts=num_experts,
            moe_grouped_gemm=False,
            qk_layernorm=config.qk_layernorm,
            normalization="RMSNorm",
        )
        norm = RMSNorm
        submodules = layer.submodules
        submodules.input_layernorm = submodules.pre_mlp_layernorm = RMSNorm
        attention = submodules.self_attention.submodules
        attention.core_attention = PackedCausalAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = forest_capable(attention.core_attention)
    if shape.is_mixture and needs_rows(router):
        layer.submodules.mlp.submodules.router = PackedRouter
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)
