"""One rank: checkpoints saved by real layouts, converted directories loaded by them, both forms compared."""

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from conversion_case import all_tensors
from oracle import LOSS, TEMPERATURE, Case
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE
from world import agreed_port, rank_arguments, report

from megatrl.actor.worker import ActorWorker, WorkerSpec
from megatrl.batching.packing import attach_old_logprobs, pack
from megatrl.checkpoint.actor_state import save_actor_state
from megatrl.checkpoint.conversion import ConversionOptions, hf_to_megatron, megatron_to_hf
from megatrl.checkpoint.conversion_check import check_same_logprobs
from megatrl.checkpoint.hf_export import export_hf_directory
from megatrl.config.engines import ActorConfig, LayoutConfig, OptimizerConfig
from megatrl.errors import MegatrlError
from megatrl.mcore.weights_directory import SHARDS


def main() -> None:
    rank, _, arguments = rank_arguments()
    if "verify" in arguments:
        report(verified(Path(arguments["verify"])))
        return
    report([save_and_load(run, rank, place) for place, run in enumerate(arguments["runs"])])


def save_and_load(run: dict[str, Any], rank: int, place: int) -> dict[str, Any]:
    """Saves what was trained from the Hugging Face files, then trains the same from the converted directory."""
    out, result = Path(run["out"]), {}
    losses = []
    for form in ("hf", "converted"):
        worker = start(run, run[form], rank, f"{place}-{form}")
        same = worker.iter_hf_weights()
        result[f"{form}_is_source"] = all(torch.equal(t, source_tensor(run, name)) for name, t in same)
        if run.get("case"):
            losses.append(one_step(worker, Path(run["case"])))
        if form == "hf":
            fill_padding(worker)
            save_actor_state(worker, out / "actor")
            export_hf_directory(worker.iter_hf_weights(), source=Path(run["hf"]), out=out / "live", is_writer=rank == 0)
        worker.close()
    return result | {"losses": losses}


def start(run: dict[str, Any], model: str, rank: int, name: str) -> ActorWorker:
    layout = LayoutConfig(**run["layout"])
    actor = ActorConfig(
        layout=layout,
        device="cpu",
        precision=run.get("precision", "fp32"),
        distributed_optimizer=run.get("distributed", True),
        optimizer=OptimizerConfig(lr=0.01),
        timeout_s=60.0,
    )
    spec = WorkerSpec(
        rank=rank,
        world_size=layout.world_size,
        master_addr="127.0.0.1",
        master_port=agreed_port(name),
        actor=actor,
        model_path=model,
        seed=1,
        num_steps=4,
    )
    return ActorWorker(spec)


def source_tensor(run: dict[str, Any], name: str) -> torch.Tensor:
    tensor = load_file(Path(run["hf"]) / "model.safetensors")[name]
    return tensor.to(torch.bfloat16) if run.get("precision") == "bf16" else tensor


def one_step(worker: ActorWorker, case_path: Path) -> float:
    case: Case = pickle.loads(case_path.read_bytes())
    batch = pack(
        case.samples,
        num_data_ranks=worker.layout.data,
        num_minibatches=case.num_minibatches,
        microbatch_tokens=40,
        loss=LOSS,
    )
    batch = attach_old_logprobs(batch, case.old_logprobs)
    return float(worker.update(batch, LOSS, temperature=TEMPERATURE, step=1).metrics["loss"])


def fill_padding(worker: ActorWorker) -> None:
    """Rows beyond the vocabulary hold what must not leak into an export."""
    layout = worker.layout
    rows = -(-VOCAB_SIZE // layout.tensor)
    num_padding = rows * layout.tensor - VOCAB_SIZE
    if layout.tensor_rank != layout.tensor - 1 or not num_padding:
        return
    with torch.no_grad():
        for model in worker.models:
            for name, parameter in model.named_parameters():
                if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                    parameter[-num_padding:] = 1e6


def verified(base: Path) -> dict[str, Any]:
    """What --verify says of whole and of damaged conversions."""
    seen: dict[str, Any] = {}
    for kind in ("qwen3", "qwen3_moe", "llama3"):
        source = base / kind
        seen[kind] = outcome(lambda out, source=source: to_megatron(source, out), base / f"{kind}-converted")
    shards = base / "qwen3_moe-converted" / SHARDS
    source = base / "qwen3_moe"
    seen["back"] = outcome(lambda out: to_hf(shards, source, out, None), base / "back")
    seen["rounded"] = outcome(lambda out: to_hf(shards, source, out, None, torch.bfloat16), base / "rounded")
    seen["damaged"] = outcome(lambda out: to_hf(shards, source, out, damage), base / "damaged")
    seen["wrong_rope"] = outcome(lambda out: to_hf(shards, source, out, other_rope), base / "wrong-rope")
    return seen


def outcome(convert: Any, out: Path) -> dict[str, Any]:
    try:
        difference = convert(out)
    except MegatrlError as error:
        return {"error": error.message, "is_published": out.exists()}
    return {"difference": difference, "is_published": out.exists()}


def to_megatron(source: Path, out: Path) -> float:
    found = []

    def check(staging: Path) -> None:
        found.append(check_same_logprobs(source, staging / SHARDS, config=staging, rounded_to=None, device="cpu"))

    hf_to_megatron(source, out=out, options=ConversionOptions(verify=check))
    return found[0].largest_difference


def to_hf(shards: Path, source: Path, out: Path, damage: Any, dtype: torch.dtype | None = None) -> float:
    found = []

    def check(staging: Path) -> None:
        if damage is not None:
            damage(staging)
        found.append(check_same_logprobs(staging, shards, config=source, rounded_to=dtype, device="cpu"))

    megatron_to_hf(shards, source=source, out=out, options=ConversionOptions(dtype=dtype, verify=check))
    return found[0].largest_difference


def damage(staging: Path) -> None:
    """One tensor of 135: the rows of one head's query projection in one layer, in another order."""
    tensors = all_tensors(staging)
    name = "model.layers.2.self_attn.q_proj.weight"
    tensors[name] = torch.cat([tensors[name][8:], tensors[name][:8]])
    save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})


def other_rope(staging: Path) -> None:
    config = json.loads((staging / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 2
    (staging / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
