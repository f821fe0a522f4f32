"""The training side: from a configuration to a trained checkpoint."""
