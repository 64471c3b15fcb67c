"""`megatrl convert`: models between Hugging Face files and Megatron's distributed checkpoints."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megatrl.cli.failures import reports_failures

if TYPE_CHECKING:
    from megatrl.checkpoint.conversion import Conversion, ConversionOptions

app = typer.Typer(help="Convert models between Hugging Face and Megatron form.", no_args_is_help=True)

Out = Annotated[Path, typer.Argument(help="Directory to write; it appears when everything is in it.")]
DType = Annotated[
    Literal["fp32", "bf16", "fp16"] | None, typer.Option("--dtype", help="Round to this; by default nothing changes.")
]
ShardGB = Annotated[float, typer.Option("--shard-gb", min=0.001, help="Largest file, in GB of 1e9 bytes.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a directory that no conversion wrote.")]
Verify = Annotated[
    bool, typer.Option("--verify", help="Compare log-probabilities of both forms on a sample; both go into memory.")
]
Device = Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="Where --verify computes.")]


@app.command(name="megatron-to-hf")
@reports_failures
def megatron_to_hf(
    checkpoint: Annotated[
        Path, typer.Argument(help="A run, its checkpoints, one checkpoint, or a converted model directory.")
    ],
    out: Out,
    *,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Of a run: this step, not the newest.")] = None,
    source: Annotated[
        Path | None, typer.Option("--source", help="Config and tokenizer; by default those of the run.")
    ] = None,
    dtype: DType = None,
    shard_gb: ShardGB = 4.0,
    force: Force = False,
    verify: Verify = False,
    device: Device = "cpu",
) -> None:
    """Write a checkpoint as a model directory that transformers and SGLang load."""
    from megatrl.checkpoint import conversion
    from megatrl.checkpoint.conversion_source import find_megatron_source

    found = find_megatron_source(checkpoint, step=step, hf=source)
    print(f"{found.what}, config and tokenizer of {found.hf}", file=sys.stderr)

    def check(staging: Path) -> None:
        _compare(staging, found.shards, found.hf, dtype, device)

    with ExitStack() as stack:
        options = _options(stack, dtype, shard_gb, force=force, verify=check if verify else None)
        _tell(conversion.megatron_to_hf(found.shards, source=found.hf, out=out, options=options))


@app.command(name="hf-to-megatron")
@reports_failures
def hf_to_megatron(
    model: Annotated[Path, typer.Argument(help="Model directory in Hugging Face form.")],
    out: Out,
    *,
    dtype: DType = None,
    shard_gb: ShardGB = 4.0,
    force: Force = False,
    verify: Verify = False,
    device: Device = "cpu",
) -> None:
    """Write a model as a distributed checkpoint that every layout loads; it can be a recipe's model.path."""
    from megatrl.checkpoint import conversion
    from megatrl.mcore.weights_directory import SHARDS

    def check(staging: Path) -> None:
        _compare(model, staging / SHARDS, staging, dtype, device)

    with ExitStack() as stack:
        options = _options(stack, dtype, shard_gb, force=force, verify=check if verify else None)
        _tell(conversion.hf_to_megatron(model, out=out, options=options))


def _options(
    stack: ExitStack, dtype: str | None, shard_gb: float, *, force: bool, verify: Callable[[Path], None] | None
) -> "ConversionOptions":
    from megatrl.checkpoint.conversion import DTYPES, ConversionOptions
    from megatrl.observability.progress import ProgressDisplay

    display: list[ProgressDisplay] = []

    def show(done: int, total: int) -> None:
        if not display:
            display.append(ProgressDisplay(total, title="tensors"))
            stack.callback(display[0].close)
        if done * 100 // total > (done - 1) * 100 // total or done == total:  # about a hundred lines in the log
            display[0].update(done, {})

    return ConversionOptions(
        dtype=None if dtype is None else DTYPES[dtype],
        shard_bytes=int(shard_gb * 1e9),
        force=force,
        on_progress=show,
        verify=verify,
    )


def _compare(hf: Path, shards: Path, config: Path, dtype: str | None, device: Literal["cpu", "cuda"]) -> None:
    from megatrl.checkpoint.conversion import DTYPES
    from megatrl.checkpoint.conversion_check import TOLERANCE, check_same_logprobs

    rounded_to = None if dtype is None else DTYPES[dtype]
    agreement = check_same_logprobs(hf, shards, config=config, rounded_to=rounded_to, device=device)
    print(
        f"verified: log-probabilities of {agreement.num_tokens} tokens differ by at most "
        f"{agreement.largest_difference:.2g} (relative, allowed {TOLERANCE:g})",
        file=sys.stderr,
    )


def _tell(done: "Conversion") -> None:
    print(
        f"{done.out}: {done.num_tensors} tensors, {', '.join(done.dtypes)}, {done.num_bytes / 1e9:.3f} GB in "
        f"{done.num_files} files of at most {done.largest_file_bytes / 1e9:.3f} GB"
    )
