"""A random model and a packed batch of log-normal lengths, with a one-process actor to run them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatrl.actor.worker import ActorWorker, WorkerSpec
from megatrl.batching.packing import attach_old_logprobs, pack
from megatrl.config.credit import LossConfig
from megatrl.config.engines import ActorConfig, LayoutConfig, OptimizerConfig
from megatrl.data.samples import IntArray, PackedBatch, TrainingSample
from megatrl.data.trajectories import TrajectoryId
from megatrl.rollout.ports import free_port

LOSS = LossConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of the model and of the batch."""

    hidden_size: int = 128
    num_layers: int = 4
    ffn_size: int = 384
    vocab_size: int = 4096
    num_tokens: int = 2048  # of all sequences together, about
    median_length: int = 150  # tokens; lengths are log-normal with sigma 0.8
    longest: int = 1024
    microbatch_tokens: int = 1024
    action_fraction: float = 0.3  # of tokens; the rest are prompts and observations
    recompute: str = "none"
    seed: int = 0


def lognormal_lengths(num_samples: int, *, median: int, longest: int, seed: int, sigma: float = 0.8) -> list[int]:
    """Sequence lengths in tokens, from 16 to `longest`."""
    draws = np.random.default_rng(seed).lognormal(np.log(median), sigma, num_samples)
    return np.clip(draws, 16, longest).astype(int).tolist()


def write_model(workload: Workload, path: Path) -> None:
    """A dense Qwen3 with random weights as a Hugging Face directory."""
    import torch
    import transformers

    heads = max(2, workload.hidden_size // 32)
    torch.manual_seed(workload.seed)
    config = transformers.Qwen3Config(
        vocab_size=workload.vocab_size,
        hidden_size=workload.hidden_size,
        num_hidden_layers=workload.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        intermediate_size=workload.ffn_size,
        tie_word_embeddings=False,
        max_position_embeddings=16384,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)


def start_actor(workload: Workload, model_path: Path) -> ActorWorker:
    """A one-process fp32 actor on CPU with the distributed optimizer, as a recipe would build it."""
    options: dict[str, Any] = {"recompute": workload.recompute}
    actor = ActorConfig(
        layout=LayoutConfig(), precision="fp32", device="cpu", optimizer=OptimizerConfig(lr=1e-5), **options
    )
    spec = WorkerSpec(
        rank=0, world_size=1, master_addr="127.0.0.1", master_port=free_port(), actor=actor,
        model_path=str(model_path), seed=1, num_steps=1000,
    )  # fmt: skip
    return ActorWorker(spec)


def packed_batch(workload: Workload) -> PackedBatch:
    """One minibatch: turns of sampled tokens between longer observations, advantages of both signs."""
    lengths = lognormal_lengths(
        max(1, workload.num_tokens // 16), median=workload.median_length, longest=workload.longest, seed=workload.seed
    )
    num_samples = max(1, int(np.searchsorted(np.cumsum(lengths), workload.num_tokens)))
    rng = np.random.default_rng(workload.seed)
    samples = [_sample(i, rng.integers(0, workload.vocab_size, lengths[i]), rng, workload) for i in range(num_samples)]
    return pack(samples, num_data_ranks=1, num_minibatches=1, microbatch_tokens=workload.microbatch_tokens, loss=LOSS)


def with_old_logprobs(actor: ActorWorker, batch: PackedBatch) -> PackedBatch:
    """The batch as the loop hands it to `ActorWorker.update`."""
    return attach_old_logprobs(batch, actor.logprobs(batch, temperature=1.0))


def _sample(index: int, tokens: IntArray, rng: np.random.Generator, workload: Workload) -> TrainingSample:
    is_action = np.zeros(len(tokens), dtype=np.bool_)
    turn = 64  # tokens of one observation and one action together
    for begin in range(0, len(tokens), turn):
        end = min(begin + turn, len(tokens))
        is_action[end - max(1, round((end - begin) * workload.action_fraction)) : end] = True
    is_action[0] = False
    return TrainingSample(
        trajectory_id=TrajectoryId(prompt_id=str(index), group_id="0", index=0),
        segment_index=0,
        tokens=tokens.astype(np.int64),
        action_mask=is_action,
        behavior_logprobs=np.where(is_action, -np.log(workload.vocab_size), 0.0),
        advantages=np.where(is_action, rng.choice([-1.0, 1.0]), 0.0),
    )
