"""GPU kernels and, beside each, the plain PyTorch that computes the same.

Importing this room imports neither Triton nor anything that needs a GPU. It knows nothing of Megatron.
"""
