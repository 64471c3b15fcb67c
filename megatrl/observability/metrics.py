"""Metric values that carry their own reduction, so that merging needs no rule about names."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self


class Metric(ABC):
    """One measured value and how two of them combine."""

    __slots__ = ()

    @abstractmethod
    def merged(self, other: Self) -> Self:
        """This value combined with a later one of the same kind."""

    @property
    @abstractmethod
    def result(self) -> float | None:
        """The plain number; None where nothing was measured."""


@dataclass(frozen=True, slots=True)
class Mean(Metric):
    """A mean of `weight` things, e.g. Mean(reward, num_trajectories). Weight 0 means nothing was measured."""

    value: float
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"Mean has weight {self.weight!r}; a weight is finite and >= 0")

    @classmethod
    def of(cls, values: Iterable[float]) -> "Mean":
        """The mean of `values`, each with weight 1."""
        listed = [float(value) for value in values]
        return cls(math.fsum(listed) / len(listed), len(listed)) if listed else cls(0.0, 0.0)

    def merged(self, other: "Mean") -> "Mean":
        if self.weight == 0:
            return other
        if other.weight == 0:
            return self
        weight = self.weight + other.weight
        return Mean(self.value * (self.weight / weight) + other.value * (other.weight / weight), weight)

    @property
    def result(self) -> float | None:
        return float(self.value) if self.weight > 0 else None


@dataclass(frozen=True, slots=True)
class Sum(Metric):
    """A total."""

    value: float

    def merged(self, other: "Sum") -> "Sum":
        return Sum(self.value + other.value)

    @property
    def result(self) -> float:
        return float(self.value)


@dataclass(frozen=True, slots=True)
class Max(Metric):
    """The largest value; NaN wins, so that it is seen."""

    value: float

    def merged(self, other: "Max") -> "Max":
        return self if math.isnan(self.value) or self.value >= other.value else other

    @property
    def result(self) -> float:
        return float(self.value)


@dataclass(frozen=True, slots=True)
class Min(Metric):
    """The smallest value; NaN wins, so that it is seen."""

    value: float

    def merged(self, other: "Min") -> "Min":
        return self if math.isnan(self.value) or self.value <= other.value else other

    @property
    def result(self) -> float:
        return float(self.value)


@dataclass(frozen=True, slots=True)
class Last(Metric):
    """The most recent value. A plain float stands for this."""

    value: float

    def merged(self, other: "Last") -> "Last":
        return other

    @property
    def result(self) -> float:
        return float(self.value)


MetricValue = Metric | float | int


def merge(*mappings: Mapping[str, MetricValue]) -> dict[str, Metric]:
    """One mapping with equal names combined, in the order given.

    Raises:
        ValueError: one name is used with two reductions.
    """
    merged: dict[str, Metric] = {}
    for mapping in mappings:
        for name, raw in mapping.items():
            value = raw if isinstance(raw, Metric) else Last(float(raw))
            earlier = merged.get(name)
            if earlier is not None and type(earlier) is not type(value):
                raise ValueError(
                    f"metric {name!r} was given as {type(earlier).__name__} and as {type(value).__name__}; "
                    "give a name one reduction"
                )
            merged[name] = value if earlier is None else earlier.merged(value)  # pyright: ignore[reportArgumentType]  # the same class, checked above
    return merged


def flatten(metrics: Mapping[str, MetricValue], *, prefix: str = "") -> dict[str, float]:
    """Plain numbers by name, sorted; a metric that measured nothing is left out, never shown as zero."""
    results = {name: metric.result for name, metric in merge(metrics).items()}
    return {f"{prefix}{name}": value for name, value in sorted(results.items()) if value is not None}
