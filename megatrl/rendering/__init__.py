"""Messages to token ids and actions to calls: the only place that knows a chat template."""
