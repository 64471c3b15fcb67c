"""One process: model directories with faults, and directories in several files."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model, write_tiny_model
from world import agreed_port, rank_arguments, report

from megatrl.config.engines import LayoutConfig
from megatrl.config.model_shape import read_model_shape
from megatrl.errors import ModelError
from megatrl.mcore import layout as layouts
from megatrl.mcore.bridge import iter_hf_weights, load_hf_weights
from megatrl.mcore.model import build_model


def main() -> None:
    rank, _, arguments = rank_arguments()
    base = Path(arguments["base"])
    write_tiny_model(base / "good", "qwen3_moe")
    shape = read_model_shape(base / "good")
    layout = layouts.initialize(
        LayoutConfig(), shape=shape, rank=rank, master_addr="127.0.0.1", master_port=agreed_port("bridge"),
        device="cpu", seed=0, timeout_s=60.0,
    )  # fmt: skip
    models = build_model(shape, layout, precision="fp32")
    good = load_file(base / "good" / "model.safetensors")
    expert = "model.layers.1.mlp.experts.3.up_proj.weight"
    damages: dict[str, Any] = {
        "missing": lambda weights: weights.pop(expert),
        "unknown": lambda weights: weights.update({"model.layers.9.mystery.weight": torch.zeros(2)}),
        "shape": lambda weights: weights.update({expert: weights[expert][:-1].contiguous()}),
        "nan": lambda weights: weights[expert].view(-1)[3].fill_(float("nan")),
        "old_rotary_table": lambda weights: weights.update({"model.layers.0.rotary_emb.inv_freq": torch.zeros(4)}),
    }
    seen: dict[str, Any] = {}
    for name, damage in damages.items():
        weights = {key: value.clone() for key, value in good.items()}
        damage(weights)
        (base / name).mkdir()
        save_file(weights, base / name / "model.safetensors")
        seen[name] = error_of(models, base / name)
    tiny_model("qwen3_moe").save_pretrained(base / "many", max_shard_size="60KB")
    seen["num_files"] = len(list((base / "many").glob("*.safetensors")))
    seen["many"] = error_of(models, base / "many")
    exported = dict(iter_hf_weights(models))
    seen["many_equal"] = all(torch.equal(exported[key], value) for key, value in good.items())
    seen["order_is_fixed"] = list(exported) == [name for name, _ in iter_hf_weights(models)]
    next((base / "many").glob("*-00002-of-*.safetensors")).unlink()
    seen["torn"] = error_of(models, base / "many")
    (base / "empty").mkdir()
    seen["empty"] = error_of(models, base / "empty")
    layouts.destroy()
    report(seen)


def error_of(models: Any, path: Path) -> str:
    try:
        load_hf_weights(models, path)
    except ModelError as error:
        return str(error)
    return "loaded"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
