"""Checkpoints to and from Hugging Face folders, without Megatron, process groups or transformers."""
