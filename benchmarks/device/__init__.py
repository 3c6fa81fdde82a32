"""Stages of `benchmarks.device_check`, and what they share."""
