"""The two readouts of one meter on the same states: time, and how far they agree.

    python -m benchmarks.meter_readout METER LABELS --device cpu --out meter_readout.json

METER is what `megatrl meter eval` takes, LABELS a directory of `megatrl meter label`. Each readout scores every
decision state of the validation trajectories once, after a few others to warm up: a second time the server would
find every prompt in its cache. Loading does not count.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from megatrl.config.engines_alone import engines_alone
from megatrl.data.meter_labels import MeterLabels
from megatrl.data.scores import Forecast
from megatrl.data.states import trajectory_states
from megatrl.observability.label_store import read_labels
from megatrl.orchestration.meter_life import meter_with_labels, opened_meter
from megatrl.orchestration.meter_scoring import ReadoutKind
from megatrl.scoring.group_meter import AskedStates

WARM_UP = 4  # trajectories


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("meter", type=Path)
    parser.add_argument("labels", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--trajectories", type=int, default=128)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    weights, labels = meter_with_labels(arguments.meter, read_labels(arguments.labels))
    states = states_of(labels, arguments.trajectories + WARM_UP)
    warm_up, asked = states[:WARM_UP], states[WARM_UP:]
    engines = engines_alone("meter-readout", arguments.device)
    results: dict[str, Any] = {
        "trajectories": len(asked),
        "states": sum(len(item.states) for item in asked),
        "history_tokens": sum(item.states[-1].length for item in asked),
        "answers": len(labels.prompt.answers),
    }
    forecasts: dict[str, list[Forecast]] = {}
    for readout in get_args(ReadoutKind):
        with (
            tempfile.TemporaryDirectory() as logs,
            opened_meter(weights, labels, engines, readout, Path(logs)) as meter,
        ):
            meter.forecast_states(warm_up)
            begin = time.perf_counter()
            answered = meter.forecast_states(asked)
            seconds = time.perf_counter() - begin
            forecasts[readout] = [forecast for item in answered.forecasts for forecast in item]
        results[f"{readout}_s"] = round(seconds, 3)
        results[f"{readout}_states_per_s"] = round(results["states"] / seconds, 1)
    results |= agreement(forecasts["candidates"], forecasts["decode"])
    print(json.dumps(results, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


def states_of(labels: MeterLabels, most: int) -> list[AskedStates]:
    """All decision states of the first validation trajectories."""
    trajectories = {example.trajectory.id: example.trajectory for example in labels.validation}
    return [
        AskedStates(
            trajectory=trajectory,
            states=tuple(s for s in trajectory_states(trajectory) if s.turn_index < trajectory.num_turns),
        )
        for trajectory in list(trajectories.values())[:most]
    ]


def agreement(candidates: Sequence[Forecast], decoded: Sequence[Forecast]) -> dict[str, float]:
    """Shares and errors of the decoded forecasts against the candidates'."""
    pairs = list(zip(candidates, decoded, strict=True))
    valid = [(c, d) for c, d in pairs if d.is_valid]
    both = [(c, d) for c, d in valid if c.completion and d.completion]
    errors = [abs(math.log((1 + c.tokens_to_go) / (1 + d.tokens_to_go))) for c, d in both]
    return {
        "decode_valid": len(valid) / len(pairs),
        "same_bit": sum(c.completion == d.completion for c, d in valid) / max(1, len(valid)),
        "median_abs_log_difference": statistics.median(errors) if errors else math.nan,
    }


if __name__ == "__main__":
    main()
