"""Triton kernels; imported on CUDA only."""
