"""Safetensors directories in Hugging Face form, read tensor by tensor: one file, or several with an index.

Experts may be stored one by one, or packed as transformers 5 holds them in memory: `experts.gate_up_proj`
[experts, 2 ffn, hidden] with the gate's rows first, and `experts.down_proj` [experts, hidden, ffn]. Readers see
single experts either way.
"""

import json
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatrl.errors import ModelError
from megatrl.mcore.weights_directory import is_weights_directory

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PACKED = re.compile(r"^(?P<experts>.*\.mlp\.experts)\.(?P<part>gate_up_proj|down_proj)$")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies: a file and a stored name, and of a packed one the expert and its block of rows."""

    file: str
    stored: str
    expert: int | None = None
    block: int | None = None  # 0: the gate's half of the rows, 1: the other half, None: all of them


class SafetensorsReader:
    """`names` and `read(name)` over a model directory; files open lazily and close with the context.

    Bytes are read, not mapped, so that memory holds the tensors that were asked for and nothing else.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises ModelError where there are no weights, or where files, index and names contradict each other."""
        self._directory = Path(path)
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self._places: dict[str, _Place] = {}
        for stored, file in self._locate().items():
            for name, place in self._expanded(stored, file):
                if name in self._places:
                    raise ModelError(
                        f"{self._directory} holds {name} twice, as {self._places[name].stored} and as {stored}; "
                        "remove one of the two"
                    )
                self._places[name] = place

    @property
    def names(self) -> frozenset[str]:
        """Hugging Face names with one name for each expert's matrix, whatever the files hold."""
        return frozenset(self._places)

    def read(self, name: str) -> Tensor:
        """Returns a tensor of its own memory. Raises ModelError naming file and tensor."""
        place = self._places[name]
        try:
            file = self._file(place.file)
            if place.expert is None:
                return file.get_tensor(place.stored)
            stored = file.get_slice(place.stored)
            if place.block is None:
                return stored[place.expert : place.expert + 1][0]
            half = stored.get_shape()[1] // 2
            rows = slice(place.block * half, (place.block + 1) * half)
            return stored[place.expert : place.expert + 1, rows][0]
        except SafetensorError as error:
            raise ModelError(
                f"{self._directory / place.file} holds no readable {place.stored}: {error}; fetch the directory again"
            ) from error

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor without reading it."""
        place = self._places[name]
        text = self._file(place.file).get_slice(place.stored).get_dtype()
        if text not in _DTYPES:
            raise ModelError(
                f"{self._directory / place.file}: {place.stored} is {text}; readable are {', '.join(_DTYPES)}. "
                "Quantized weights have to be unpacked first"
            )
        return _DTYPES[text]

    def _locate(self) -> dict[str, str]:
        """Stored name -> file, after comparing the index with the files both ways."""
        if not (self._directory / INDEX_FILE).is_file():
            if not (self._directory / SINGLE_FILE).is_file():
                if is_weights_directory(self._directory):
                    raise ModelError(
                        f"{self._directory} is a converted model and has no safetensors; train from it as it is, or "
                        "make some with megatrl convert megatron-to-hf"
                    )
                raise ModelError(
                    f"{self._directory} has neither {INDEX_FILE} nor {SINGLE_FILE}; weights must be in safetensors form"
                )
            return dict.fromkeys(self._file(SINGLE_FILE).keys(), SINGLE_FILE)
        indexed = self._index()
        found = {name: file for file in sorted(set(indexed.values())) for name in self._file(file).keys()}  # noqa: SIM118
        files = {path.name for path in self._directory.glob("*.safetensors")}
        if stray := sorted(files - set(indexed.values())):
            raise ModelError(
                f"{self._directory} has {stray[:3]}, which {INDEX_FILE} does not name; remove what does not belong to "
                "the model, or fetch the directory again"
            )
        if found != indexed:
            absent = sorted(name for name, file in indexed.items() if found.get(name) != file)
            extra = sorted(found.keys() - indexed.keys())
            raise ModelError(
                f"{INDEX_FILE} in {self._directory} is not the one of its files: {len(absent)} tensors are not where "
                f"it says {absent[:3]}, {len(extra)} are not in it {extra[:3]}; fetch the directory again"
            )
        return indexed

    def _index(self) -> dict[str, str]:
        index = self._directory / INDEX_FILE
        try:
            return dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{index} is not readable ({error!r}); fetch the model directory again") from error

    def _expanded(self, stored: str, file: str) -> list[tuple[str, _Place]]:
        """The names under which a stored tensor is read, one unless it packs experts."""
        match = _PACKED.match(stored)
        if match is None:
            return [(stored, _Place(file, stored))]
        shape = self._file(file).get_slice(stored).get_shape()
        if len(shape) != 3:
            raise ModelError(f"{self._directory / file}: {stored} has shape {shape}, packed experts have 3 dimensions")
        parts = ("gate_proj", "up_proj") if match["part"] == "gate_up_proj" else ("down_proj",)
        return [
            (
                f"{match['experts']}.{expert}.{part}.weight",
                _Place(file, stored, expert, block if len(parts) == 2 else None),
            )
            for expert in range(shape[0])
            for block, part in enumerate(parts)
        ]

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self._directory / name
            if not path.is_file():
                raise ModelError(f"{path} is named in {INDEX_FILE} but does not exist; the model directory is torn")
            try:
                opened = safe_open(str(path), framework="pt", device="cpu", backend="pread")
                self._open[name] = self._stack.enter_context(opened)
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path} ({path.stat().st_size} bytes) is not readable: {error}; fetch the model directory again"
                ) from error
        return self._open[name]

    def __enter__(self) -> "SafetensorsReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
