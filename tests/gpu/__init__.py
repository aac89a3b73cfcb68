"""Tests of what only a GPU can show. Each test has a half that takes the same path on the CPU, at a tiny size."""
