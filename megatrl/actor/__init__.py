"""The trainable policy on Megatron-Core: one plain class for each rank."""

from megatrl.mcore import import_warnings as import_warnings
