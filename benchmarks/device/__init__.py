"""Stages of `benchmarks.device_check`, and what they share."""

from benchmarks.device.missing import stand_in_for_missing

stand_in_for_missing()  # before any module of theirs is imported, in whichever process
