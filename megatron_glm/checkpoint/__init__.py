"""Checkpoints: sharded ones for training, Hugging Face folders, and the conversion of one into the other."""
