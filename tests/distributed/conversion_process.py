"""A process of its own that converts: killed in mid-write, or measuring its memory. See test_conversion_process.py."""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from megatrl.checkpoint.conversion import ConversionOptions, hf_to_megatron, megatron_to_hf
from megatrl.mcore.weights_directory import SHARDS


def main() -> None:
    mode, direction, arguments = sys.argv[1], sys.argv[2], [Path(text) for text in sys.argv[4:]]
    shard_bytes = int(sys.argv[3])
    if mode == "killed":
        source, out = arguments
        convert(direction, source, out, ConversionOptions(shard_bytes=shard_bytes, on_progress=die_half_way))
        return
    tiny, source, out = arguments
    options = ConversionOptions(shard_bytes=shard_bytes)
    convert(direction, tiny, out.with_name(f"{out.name}-tiny"), options)  # what the libraries take
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is held now
    before = held_bytes("VmHWM")
    done = convert(direction, source, out, options)
    report = {"bytes": held_bytes("VmHWM") - before, "largest": done.largest_file_bytes, "total": done.num_bytes}
    print(json.dumps(report))


def convert(direction: str, source: Path, out: Path, options: ConversionOptions) -> Any:
    if direction == "hf-to-megatron":
        return hf_to_megatron(source, out=out, options=options)
    return megatron_to_hf(source / SHARDS, source=source, out=out, options=options)


def die_half_way(done: int, total: int) -> None:
    if done * 2 > total:
        os.kill(os.getpid(), signal.SIGKILL)


def held_bytes(what: str) -> int:
    """Resident memory by its name in /proc/self/status. getrusage would count the parent's, from before exec."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(lines[what].split()[0]) * 1024


if __name__ == "__main__":
    main()
