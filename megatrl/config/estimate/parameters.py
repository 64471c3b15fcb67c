"""Parameters: how many a model has, and which tensors of which size one rank holds."""

from collections.abc import Iterable
from dataclasses import dataclass

from megatrl.config.estimate.degrees import Degrees
from megatrl.config.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class RankTensor:
    """One parameter tensor on one rank."""

    name: str
    size: int  # elements
    is_expert: bool = False
    is_shared_embedding: bool = False  # of a tied model over several stages: gets a bucket of its own


def padded_vocab_size(shape: ModelShape, tensor: int) -> int:
    """Returns the rows of embedding and output layer: vocab_size rounded up to a multiple of TP."""
    return -(-shape.vocab_size // tensor) * tensor


def attention_parameters(shape: ModelShape) -> int:
    """Returns the matrix parameters of one layer's attention: qkv and output projection."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return shape.hidden_size * (2 * query + 2 * key)


def expert_parameters(shape: ModelShape) -> int:
    """Returns the parameters of one expert: gate, up and down."""
    return 3 * shape.hidden_size * shape.expert_ffn_size


def norm_parameters(shape: ModelShape) -> int:
    return 2 * shape.hidden_size + (2 * shape.head_dim if shape.has_qk_norm else 0)


def total_parameters(shape: ModelShape) -> int:
    """Returns the parameters of the whole model as its files hold them, a tied embedding once."""
    ends = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2) + shape.hidden_size
    if shape.is_mixture:
        feed_forward = shape.hidden_size * shape.num_experts + shape.num_experts * expert_parameters(shape)
    else:
        feed_forward = 3 * shape.hidden_size * shape.ffn_size
    return ends + shape.num_layers * (attention_parameters(shape) + norm_parameters(shape) + feed_forward)


def active_parameters(shape: ModelShape) -> int:
    """Returns the parameters that one token meets, embeddings included: of the experts only its own."""
    if not shape.is_mixture:
        return total_parameters(shape)
    idle = shape.num_experts - shape.num_experts_per_token
    return total_parameters(shape) - shape.num_layers * idle * expert_parameters(shape)


def rank_tensors(shape: ModelShape, degrees: Degrees, *, stage: int, chunk: int = 0) -> list[RankTensor]:
    """Returns the tensors of one model chunk on any rank of a stage, in the order in which Megatron registers them.

    Every tensor and expert rank of the stage holds tensors of the same sizes.
    """
    is_first = stage == 0 and chunk == 0
    is_last = stage == degrees.pipeline - 1 and chunk == degrees.virtual - 1
    is_shared = shape.tie_word_embeddings and degrees.pipeline > 1
    ends = padded_vocab_size(shape, degrees.tensor) // degrees.tensor * shape.hidden_size
    tensors: list[RankTensor] = []
    if is_first:
        tensors.append(RankTensor("embedding.word_embeddings.weight", ends, is_shared_embedding=is_shared))
    for layer in range(len(degrees.chunks[stage][chunk])):
        tensors += _layer_tensors(shape, degrees, f"decoder.layers.{layer}.")
    if is_last:
        tensors.append(RankTensor("decoder.final_layernorm.weight", shape.hidden_size))
        if not shape.tie_word_embeddings or degrees.pipeline > 1:
            tensors.append(RankTensor("output_layer.weight", ends, is_shared_embedding=is_shared))
    return tensors


def _layer_tensors(shape: ModelShape, degrees: Degrees, prefix: str) -> Iterable[RankTensor]:
    hidden, tensor = shape.hidden_size, degrees.tensor
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield RankTensor(f"{prefix}input_layernorm.weight", hidden)
    yield RankTensor(f"{prefix}self_attention.linear_proj.weight", hidden * query // tensor)
    yield RankTensor(f"{prefix}self_attention.linear_qkv.weight", hidden * (query + 2 * key) // tensor)
    if shape.has_qk_norm:
        yield RankTensor(f"{prefix}self_attention.q_layernorm.weight", shape.head_dim)
        yield RankTensor(f"{prefix}self_attention.k_layernorm.weight", shape.head_dim)
    yield RankTensor(f"{prefix}pre_mlp_layernorm.weight", hidden)
    if not shape.is_mixture:
        yield RankTensor(f"{prefix}mlp.linear_fc1.weight", 2 * hidden * shape.ffn_size // tensor)
        yield RankTensor(f"{prefix}mlp.linear_fc2.weight", hidden * shape.ffn_size // tensor)
        return
    yield RankTensor(f"{prefix}mlp.router.weight", hidden * shape.num_experts)
    cut = hidden * shape.expert_ffn_size // degrees.expert_tensor
    for expert in range(shape.num_experts // degrees.expert):
        place = f"{prefix}mlp.experts.local_experts.{expert}."
        yield RankTensor(f"{place}linear_fc1.weight", 2 * cut, is_expert=True)
        yield RankTensor(f"{place}linear_fc2.weight", cut, is_expert=True)


def rank_parameters(shape: ModelShape, degrees: Degrees, stage: int) -> tuple[int, int]:
    """Returns (dense, expert) parameters on a rank of a stage, over all its model chunks."""
    tensors = [t for chunk in range(degrees.virtual) for t in rank_tensors(shape, degrees, stage=stage, chunk=chunk)]
    expert = sum(tensor.size for tensor in tensors if tensor.is_expert)
    return sum(tensor.size for tensor in tensors) - expert, expert
