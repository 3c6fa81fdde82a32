"""Kernels for x86-64 CPUs, compiled by numba when they are first called and kept on disk."""
