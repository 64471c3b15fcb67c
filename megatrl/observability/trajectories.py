"""Every step's prompt groups on disk, also the dropped ones: one gzip file of JSON lines for each step."""

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatrl.data.wire import GroupRecord, TornLine, TornLines, decode_lines, encode_record
from megatrl.errors import TrajectoryError
from megatrl.observability.atomic_file import replace_file, unused_path

# Level 6 halves the file once more but takes four times as long; the loop waits for this.
_GZIP_LEVEL = 2


class TrajectoryStore:
    """The trajectories of one run: `trajectories/step_000012.jsonl.gz`, written whole, by rename.

    Two streams: "step" holds what a step played, "eval_step" what an evaluation after it played.
    """

    def __init__(self, run_dir: Path) -> None:
        self.directory = run_dir / "trajectories"

    def path(self, step: int, stream: str = "step") -> Path:
        return self.directory / f"{stream}_{step:06d}.jsonl.gz"

    def write(self, step: int, records: Iterable[GroupRecord], stream: str = "step") -> Path:
        """Store a step. A second call for the same step replaces the first."""
        path = self.path(step, stream)
        write_records(path, records)
        return path

    def steps(self, stream: str = "step") -> tuple[int, ...]:
        """Stored steps, ascending."""
        pattern = re.compile(rf"{re.escape(stream)}_(\d+)\.jsonl\.gz")
        if not self.directory.is_dir():
            return ()
        matches = (pattern.fullmatch(path.name) for path in self.directory.iterdir())
        return tuple(sorted(int(match.group(1)) for match in matches if match))

    def read(self, step: int, stream: str = "step") -> tuple[GroupRecord, ...]:
        """The groups of one step.

        Raises:
            TrajectoryError: the step is not stored (says which are), or its file is damaged.
        """
        path = self.path(step, stream)
        if not path.exists():
            steps = self.steps(stream)
            stored = f"stored are {len(steps)} steps from {steps[0]} to {steps[-1]}" if steps else "none is stored"
            raise TrajectoryError(f"no trajectories of step {step} in {self.directory}; {stored}")
        records, _ = read_records(path)
        return records

    def set_aside_after(self, step: int) -> Path | None:
        """Move the files of steps after `step` into a directory of their own; returns it, None if nothing moved.

        Also deletes what a killed writer left unfinished. Only the run's one writer may call this.
        """
        for unfinished in self.directory.glob(".*.jsonl.gz.*.tmp"):
            unfinished.unlink()
        later = [
            self.path(number, stream)
            for stream in ("step", "eval_step")
            for number in self.steps(stream)
            if number > step
        ]
        if not later:
            return None
        aside = unused_path(self.directory / "set-aside")
        aside.mkdir(parents=True)
        for path in later:
            path.replace(aside / path.name)
        return aside


def write_records(path: Path, records: Iterable[GroupRecord]) -> int:
    """Write records to a `.jsonl` or `.jsonl.gz` file that appears whole; returns their number."""
    count = 0
    with replace_file(path) as file:
        if path.suffix == ".gz":
            # A fixed mtime: equal groups give equal bytes.
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=_GZIP_LEVEL, mtime=0) as packed:
                for record in records:
                    packed.write(f"{encode_record(record)}\n".encode())
                    count += 1
        else:
            for record in records:
                file.write(f"{encode_record(record)}\n".encode())
                count += 1
    return count


def read_records(path: Path) -> tuple[tuple[GroupRecord, ...], tuple[TornLine, ...]]:
    """The whole records of a file, and the cut last line where its writer was killed.

    Raises:
        TrajectoryError: a line that is not the last is damaged, or a field or version is unknown.
    """
    torn = TornLines()
    records = tuple(decode_lines(_lines(path), path=str(path), torn=torn))
    return records, tuple(torn.found)


def _lines(path: Path) -> Iterator[bytes]:
    if path.suffix != ".gz":
        with path.open("rb") as file:
            yield from file
        return
    # gzip.open raises in the middle of a cut stream and loses what came before, so unpack by hand.
    unpacker = zlib.decompressobj(wbits=31)
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            try:
                rest += unpacker.decompress(chunk)
            except zlib.error as error:
                raise TrajectoryError(f"{path}: damaged gzip data ({error})") from error
            *whole, rest = rest.split(b"\n")
            yield from (line + b"\n" for line in whole)
    rest += unpacker.flush()
    *whole, rest = rest.split(b"\n")
    yield from (line + b"\n" for line in whole)
    if rest or not unpacker.eof:
        yield rest
