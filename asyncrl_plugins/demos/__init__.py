"""Demos around a real pretrained language model: a published visual benchmark, and a task of words."""
