"""megatrl: RL post-training for multi-turn LLM agents with step-level credit."""

__version__ = "0.1.0"
