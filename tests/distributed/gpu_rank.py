"""One CUDA process: Transformer Engine's attention against ours, and the bf16 actor against the oracle."""

import gc
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from oracle import LOSS, TEMPERATURE, Case
from world import agreed_port, rank_arguments, report

from megatrl.actor.worker import ActorWorker, WorkerSpec
from megatrl.batching.packing import attach_old_logprobs, pack
from megatrl.config.engines import ActorConfig, LayoutConfig, OptimizerConfig
from megatrl.mcore.attention import PackedCausalAttention
from megatrl.mcore.model import unwrap


def main() -> None:
    rank, world_size, arguments = rank_arguments()
    case: Case = pickle.loads(Path(arguments["case"]).read_bytes())
    actor = ActorConfig(
        layout=LayoutConfig(world_size=world_size),
        precision="bf16",
        device="cuda",
        optimizer=OptimizerConfig(lr=1e-3),
        timeout_s=120.0,
    )
    worker = ActorWorker(
        WorkerSpec(
            rank=rank, world_size=world_size, master_addr="127.0.0.1", master_port=agreed_port("gpu"), actor=actor,
            model_path=case.model_path, seed=1, num_steps=5,
        )
    )  # fmt: skip
    batch = pack(case.samples, num_data_ranks=1, num_minibatches=2, microbatch_tokens=60, loss=LOSS)
    seen: dict[str, Any] = {"attention": attention_error(worker)}
    logprobs = worker.logprobs(batch, temperature=TEMPERATURE)
    masks = [sample.action_mask for sample in case.samples]
    gaps = [np.abs(logprobs[i] - case.expected.logprobs[i])[masks[i]] for i in logprobs]
    seen["mean_gap"] = float(np.concatenate(gaps).mean())
    filled = attach_old_logprobs(batch, case.old_logprobs)
    before = worker.parameter_hash()
    update = worker.update(filled, LOSS, temperature=TEMPERATURE, step=1)
    seen["grad_norm"] = update.metrics["grad_norm"]
    seen["moved"] = worker.parameter_hash() != before
    seen |= memory_hand_over(worker)
    worker.update(filled, LOSS, temperature=TEMPERATURE, step=2)
    seen["left_after_another_step"] = memory_hand_over(worker)["left_on_device"]
    worker.close()
    report(seen)


def memory_hand_over(worker: ActorWorker) -> dict[str, Any]:
    """Tensors of more than 256 bytes that the garbage collector finds on the device meanwhile, and what came back."""
    before, allocated = worker.parameter_hash(), torch.cuda.memory_allocated()
    worker.offload()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and thing.is_cuda]
    left = [f"{tuple(t.shape)} {t.dtype}" for t in tensors if t.untyped_storage().nbytes() > 256]
    freed = allocated - torch.cuda.memory_allocated()
    expected = worker._memory.released_bytes
    worker.onload()
    return {
        "left_on_device": left,
        "freed_fraction": freed / expected,
        "same_after_onload": worker.parameter_hash() == before,
    }


def attention_error(worker: ActorWorker) -> float:
    model: Any = unwrap(worker.models[0])
    theirs, config = model.decoder.layers[0].self_attention.core_attention, model.config
    ours = PackedCausalAttention(config, 1, AttnMaskType.causal, "self")
    generator = torch.Generator(device="cuda").manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    query = torch.randn(37, config.num_attention_heads, config.kv_channels, **options)
    key, value = (torch.randn(37, config.num_query_groups, config.kv_channels, **options) for _ in range(2))
    bounds = torch.tensor([0, 5, 6, 37], dtype=torch.int32, device="cuda")
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=31, max_seqlen_kv=31
    )
    arguments: dict[str, Any] = {"attn_mask_type": AttnMaskType.causal, "packed_seq_params": packed}
    outputs = [attend(query, key, value, None, **arguments).reshape(37, -1) for attend in (theirs, ours)]
    return float((outputs[0] - outputs[1]).abs().max())


if __name__ == "__main__":
    main()
