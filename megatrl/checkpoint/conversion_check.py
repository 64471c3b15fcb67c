"""Whether two forms of one model say the same: log-probabilities on a sample of tokens, by two implementations."""

import gc
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from megatrl.checkpoint.tiny_model import no_progress_bars
from megatrl.config.engines import LayoutConfig
from megatrl.config.model_shape import ModelShape, read_model_shape
from megatrl.data.queries import PackedQueries
from megatrl.data.samples import FloatArray, IntArray
from megatrl.errors import CheckpointError
from megatrl.mcore import layout as layouts
from megatrl.mcore.layout import Device
from megatrl.mcore.model import build_model
from megatrl.mcore.queries import target_logprobs
from megatrl.mcore.sharded_weights import load_sharded_weights
from megatrl.rollout.ports import free_port

logger = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Largest |difference| / max(1, |log-probability|). Both sides compute in fp32, whatever the files hold."""
NUM_SEQUENCES, SEQUENCE_TOKENS = 4, 160  # longer than 100, where a wrong rope base shows

_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far transformers on the Hugging Face side and Megatron on the other side are apart."""

    largest_difference: float  # relative as TOLERANCE says
    num_tokens: int


def check_same_logprobs(
    hf: Path, shards: Path, *, config: Path, rounded_to: torch.dtype | None, device: Device
) -> Agreement:
    """Returns the agreement of the Hugging Face directory `hf` with the weights in `shards`.

    `config` is the directory whose config.json the Megatron model follows: the other side of the conversion, so that
    a wrong config.json is found too.

    One process: transformers first, then a Megatron model in a world of one; each model is in memory in fp32 as a
    whole. `rounded_to` is the dtype that the conversion rounded to, so that rounding is no difference.
    Raises CheckpointError above TOLERANCE.
    """
    shape = read_model_shape(config)
    tokens = _sample(shape)
    with no_progress_bars():
        theirs = _transformers_logprobs(hf, tokens, rounded_to, device)
    gc.collect()
    ours = _megatron_logprobs(shards, shape, tokens, rounded_to, device)
    difference = np.abs(theirs - ours) / np.maximum(1.0, np.abs(theirs))
    agreement = Agreement(largest_difference=float(difference.max()), num_tokens=difference.size)
    logger.info("log-probabilities compared tokens=%d largest=%.3g", difference.size, agreement.largest_difference)
    if not agreement.largest_difference <= TOLERANCE:  # NaN is no agreement either
        share = float((~(difference <= TOLERANCE)).mean())
        raise CheckpointError(
            f"the converted model is not the original: log-probabilities of {hf} and {shards} differ by up to "
            f"{agreement.largest_difference:.3g} on {difference.size} tokens, {share:.1%} of them by more than "
            f"{TOLERANCE:g}; nothing is published"
        )
    return agreement


def _sample(shape: ModelShape) -> list[IntArray]:
    length = min(SEQUENCE_TOKENS, shape.max_positions)
    rng = np.random.default_rng(0)
    return [rng.integers(0, shape.vocab_size, length) for _ in range(NUM_SEQUENCES)]


def _transformers_logprobs(
    path: Path, tokens: list[IntArray], rounded_to: torch.dtype | None, device: Device
) -> FloatArray:
    """Log-probability of every token after the first of its sequence, [tokens]."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    model = model.to(device).eval()
    _round(model, rounded_to)
    columns = []
    with torch.no_grad():
        for sequence in tokens:
            ids = torch.from_numpy(sequence).to(device)
            table = model(ids[None]).logits[0, :-1].double().log_softmax(-1)
            columns.append(table.gather(1, ids[1:, None])[:, 0].cpu().numpy())
    return np.concatenate(columns)


def _megatron_logprobs(
    shards: Path, shape: ModelShape, tokens: list[IntArray], rounded_to: torch.dtype | None, device: Device
) -> FloatArray:
    layout = layouts.initialize(
        LayoutConfig(),
        shape=shape,
        rank=0,
        master_addr="127.0.0.1",
        master_port=free_port(),
        device=device,
        seed=0,
        timeout_s=_TIMEOUT_S,
    )
    try:
        models = build_model(shape, layout, precision="fp32")
        load_sharded_weights(models, shards, is_weights_alone=False)
        for model in models:
            _round(model, rounded_to)
        return np.concatenate([target_logprobs(models, layout, [_query(sequence)])[0] for sequence in tokens])
    finally:
        layouts.destroy()


def _query(sequence: IntArray) -> PackedQueries:
    length = len(sequence)
    return PackedQueries(
        tokens=sequence,
        cu_seqlens=np.array([0, length]),
        rows=np.arange(length - 1),
        targets=sequence[1:],
    )


def _round(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    if dtype is None:
        return
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
