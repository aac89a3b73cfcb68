"""Attention of packed rows: `shared_prefix` computes the prompt of a group once, by `prefix_kernels` or a mask."""
