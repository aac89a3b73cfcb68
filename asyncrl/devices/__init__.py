"""Devices by their configured name, copies between host and device, and offloading for sync mode."""
