"""Hugging Face weights into and out of Megatron models, by our own map (`weight_map.py`).

Why not a library's: docs/adr/0002-own-weight-mapping.md.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatrl.config.model_shape import ModelShape
from megatrl.config.pipeline import Chunks
from megatrl.errors import ModelError
from megatrl.mcore.groups import broadcast, expert_group, expert_tensor_group, pipeline_group, tensor_group
from megatrl.mcore.model import CausalModel, padded_vocab_size, shape_of, unwrap
from megatrl.mcore.safetensors_reader import SafetensorsReader
from megatrl.mcore.sharded_weights import load_sharded_directory
from megatrl.mcore.weight_map import (
    EMBEDDING,
    HF_EMBEDDING,
    HF_OUTPUT,
    OUTPUT,
    WeightRule,
    cut,
    fuse,
    global_name,
    hf_tensor_shape,
    join,
    unfuse,
    weight_rules,
)
from megatrl.mcore.weights_directory import is_weights_directory


def load_hf_weights(models: Sequence[torch.nn.Module], path: str | Path) -> None:
    """Fills every parameter of this rank from the Hugging Face files in `path`; no communication.

    A directory that `megatrl convert hf-to-megatron` wrote loads too, collectively over all ranks.

    Parameters are NaN first, so that one left out cannot pass. Raises ModelError, naming tensors, for
    files with missing, unknown or wrongly shaped tensors and for a parameter not written exactly once.
    An optimizer with master weights must reload them afterwards (`ActorWorker.load_hf` does).
    """
    if is_weights_directory(path):
        load_sharded_directory(models, path)
        return
    shape = shape_of(models)
    targets = _named_parameters(models)
    rules = {rule.megatron_name: rule for rule in _rules_with_tied_output(shape)}
    if unknown := sorted(set(targets) - set(rules)):
        raise ModelError(f"no weight rule for the Megatron parameters {unknown[:5]}; add them to mcore/weight_map.py")
    with torch.no_grad(), SafetensorsReader(path) as reader:
        _check_names(reader.names, shape, path)
        for parameter in targets.values():
            parameter.fill_(float("nan"))
        for name, parameter in targets.items():
            _load_parameter(parameter, rules[name], reader, shape)
    if unwritten := sorted(name for name, parameter in targets.items() if bool(parameter.isnan().any())):
        raise ModelError(f"NaN after loading {path} in {unwritten[:5]}: the files hold NaN or a part was not written")


def iter_hf_weights(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, full tensor) of the whole model, in one pass and one fixed order.

    Collective over all ranks, and every rank must run it to the end: each gets every tensor, on its
    device, trimmed to vocab_size, experts one by one. Tied models have no lm_head. A tensor may share
    memory with the live parameter, so copy what outlives the next optimizer step.
    """
    first = unwrap(models[0])
    shape, stages = first.shape, _stages(first.chunks)
    parameters = _named_parameters(models)
    for rule in weight_rules(shape):
        owner = _owning_stage(rule, stages)
        full = _gathered(rule, parameters, shape) if owner == pipeline_group().rank() else None
        tensors: Sequence[Tensor | None] = [None] * len(rule.hf_names) if full is None else unfuse(rule, full, shape)
        for name, tensor in zip(rule.hf_names, tensors, strict=True):
            yield name, _from_owning_stage(owner, name, tensor, first)


def _named_parameters(models: Sequence[torch.nn.Module]) -> dict[str, Tensor]:
    """Returns this rank's parameters, of all chunks, under global names; a name that occurs twice is an error."""
    named: dict[str, Tensor] = {}
    for model in (unwrap(m) for m in models):
        first_expert = expert_group().rank() * (model.shape.num_experts // expert_group().size())
        for name, parameter in model.named_parameters():
            full_name = global_name(name, first_layer=model.layers.start, first_expert=first_expert)
            if full_name in named:
                raise ModelError(f"two parameters are called {full_name}; the second is {name}")
            named[full_name] = parameter
    return named


def _rules_with_tied_output(shape: ModelShape) -> Iterator[WeightRule]:
    """The rules, and for a tied model also the last stage's own copy of the embedding."""
    for rule in weight_rules(shape):
        yield rule
        if shape.tie_word_embeddings and rule.megatron_name == EMBEDDING:
            yield WeightRule(
                megatron_name=OUTPUT, hf_names=(HF_EMBEDDING,), fusion="vocab", split_dim=0, layer=None, expert=None
            )


def _check_names(present: frozenset[str], shape: ModelShape, path: str | Path) -> None:
    expected = {name for rule in weight_rules(shape) for name in rule.hf_names}
    # a tied checkpoint may store lm_head as well; rotary tables are derived, old files store them
    ignored = {HF_OUTPUT} if shape.tie_word_embeddings else set()
    unknown = {name for name in present - expected - ignored if not name.endswith(".rotary_emb.inv_freq")}
    missing = expected - present
    if missing or unknown:
        raise ModelError(
            f"the weights in {path} do not match its config.json: {len(missing)} missing {sorted(missing)[:4]}, "
            f"{len(unknown)} unknown {sorted(unknown)[:4]}"
        )


def _load_parameter(parameter: Tensor, rule: WeightRule, reader: SafetensorsReader, shape: ModelShape) -> None:
    tensors = []
    for name in rule.hf_names:
        tensor, expected = reader.read(name), hf_tensor_shape(shape, name)
        if tuple(tensor.shape) != expected:
            raise ModelError(f"{name} has shape {tuple(tensor.shape)}, config.json implies {expected}")
        tensors.append(tensor.to(parameter.dtype))
    padded_vocab = padded_vocab_size(shape, tensor_group().size())
    group = _splitting_group(rule)
    full = fuse(rule, tensors, shape, padded_vocab=padded_vocab)
    part = cut(rule, full, num_ranks=group.size(), rank=group.rank())
    if part.shape != parameter.shape:
        raise ModelError(f"{rule.megatron_name} has shape {tuple(parameter.shape)} here, its part {tuple(part.shape)}")
    parameter.copy_(part)


def _gathered(rule: WeightRule, parameters: dict[str, Tensor], shape: ModelShape) -> Tensor:
    """Returns the full parameter. Collective over the ranks of the stage that owns it."""
    if rule.expert is not None and expert_group().size() > 1:
        return _expert_from_owner(rule, rule.expert, parameters, shape)
    return _joined(rule, parameters[rule.megatron_name].detach())


def _joined(rule: WeightRule, part: Tensor) -> Tensor:
    group = _splitting_group(rule)
    if rule.split_dim is None or group.size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return join(rule, parts)


def _splitting_group(rule: WeightRule) -> dist.ProcessGroup:
    """The ranks among which a parameter with a `split_dim` is cut."""
    return tensor_group() if rule.expert is None else expert_tensor_group()


def _expert_from_owner(rule: WeightRule, expert: int, parameters: dict[str, Tensor], shape: ModelShape) -> Tensor:
    """The ranks that share an expert join it, and each hands it to the other expert ranks."""
    owner = expert // (shape.num_experts // expert_group().size())
    if rule.megatron_name in parameters:
        tensor = _joined(rule, parameters[rule.megatron_name].detach()).contiguous()
    else:
        rows, columns = hf_tensor_shape(shape, rule.hf_names[0])
        anchor = next(iter(parameters.values()))
        tensor = torch.empty(len(rule.hf_names) * rows, columns, dtype=anchor.dtype, device=anchor.device)
    broadcast(tensor, source=owner, group=expert_group())
    return tensor


def _from_owning_stage(owner: int, name: str, tensor: Tensor | None, model: CausalModel) -> Tensor:
    if pipeline_group().size() == 1:
        assert tensor is not None, "the only stage owns every tensor"
        return tensor
    if tensor is None:
        anchor = next(model.parameters())
        tensor = torch.empty(hf_tensor_shape(model.shape, name), dtype=anchor.dtype, device=anchor.device)
    tensor = tensor.contiguous()
    broadcast(tensor, source=owner, group=pipeline_group())
    return tensor


def _stages(chunks: Chunks) -> dict[int, int]:
    """Returns layer -> the pipeline stage that holds it."""
    return {layer: stage for stage, of_stage in enumerate(chunks) for layers in of_stage for layer in layers}


def _owning_stage(rule: WeightRule, stages: dict[int, int]) -> int:
    if rule.layer is not None:
        return stages[rule.layer]
    return 0 if rule.megatron_name == EMBEDDING else pipeline_group().size() - 1
