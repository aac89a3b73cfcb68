"""Measurements that are run by hand or by `make bench`. Some sample with the scripted engine of the tests."""

from tests.rigs.scripted_path import install_scripted_engine

install_scripted_engine()
