"""Megatron-Core: layout, models, weights, schedules and log-probabilities, on CPU and CUDA alike."""

from megatrl.mcore import import_warnings as import_warnings
