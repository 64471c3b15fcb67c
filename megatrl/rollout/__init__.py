"""Rollouts: SGLang server processes, a client that samples from them, episodes and their collector."""
