"""What the kernels make of fixed inputs, for comparison between processes that compile for different CPUs.

`python -m tests.support.cpu_instructions OUT.npz [test files]` runs the tests, then writes the results.
"""

from __future__ import annotations

import sys

import llvmlite.binding as llvm
import numpy as np
import pytest

from kernels.cpu import isa, operations
from kernels.cpu.rows import GELU_TANH, SILU
from kernels.cpu.team import Team
from tests.support.kernels import (
    HALF,
    Chunk,
    Pools,
    as_kept,
    known_weights,
    packed_weights,
    product,
    room_for_rows,
    round_rows,
    run,
    run_attention,
)

# LLVM's names for what CPUs have: Intel's Haswell AVX2, Skylake AVX-512 without products of bytes, and Ice Lake those.
_AVX2 = "avx avx2 bmi bmi2 cmov cx16 f16c fma lzcnt movbe popcnt sse sse2 sse3 sse4.1 sse4.2 ssse3 xsave"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
CPUS = {
    "haswell": _AVX2,
    "skylake-avx512": _AVX512,
    "icelake-server": f"{_AVX512} avx512vnni avx512vbmi avx512vbmi2",
}


def environment(cpu: str) -> dict[str, str]:
    """What makes numba compile for one of `CPUS`."""
    return {
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in CPUS[cpu].split()),
    }


def is_here(cpu: str) -> bool:
    """Whether this CPU can run it."""
    return set(CPUS[cpu].split()) <= {name for name, has in llvm.get_host_cpu_features().items() if has}


def results() -> dict[str, np.ndarray]:
    team = Team(2)
    try:
        return {"features": np.array(sorted(isa.features()))} | _products(team) | _rows(team) | _attention(team)
    finally:
        team.close()


def _products(team: Team) -> dict[str, np.ndarray]:
    generator, out = np.random.default_rng(0), {}
    for count, groups, outputs in ((1, 18, 100), (2, 1, 16), (7, 5, 33), (16, 20, 64), (29, 48, 48)):
        x = (generator.standard_normal((count, 32 * groups)) * 3).astype(np.float32)
        for bits in (4, 8):
            random = generator.standard_normal((outputs, 32 * groups)).astype(np.float32)
            for name, weight in (("on grid", known_weights(generator, outputs, groups, bits).values), ("", random)):
                weights = packed_weights(weight, bits, generator.standard_normal(outputs).astype(np.float32))
                key = f"{count} x {groups} x {outputs}, {bits} bits {name}"
                out[f"weights {key}"], out[f"product {key}"] = weights.packed, product(team, x, weights)
    return out


def _rows(team: Team) -> dict[str, np.ndarray]:
    generator, out = np.random.default_rng(1), {}
    x = (generator.standard_normal((9, 640)) * 2).astype(np.float32)
    weight = generator.standard_normal(640).astype(np.float32)
    rounded = round_rows(team, x)
    out["codes"], out["scales"] = rounded.codes, rounded.scales
    normed, added, capped = room_for_rows(9, 20), x[::-1].copy(), x.copy()
    run(team, [operations.norm(x, weight, 1e-5, normed.codes, normed.scales)], tokens=9)
    run(team, [operations.add_norm(x, weight, 1e-5, added), operations.soft_cap(capped, 2.0)], tokens=9, LOGITS=9)
    out |= {"norm codes": normed.codes, "norm scales": normed.scales, "add_norm": added, "soft_cap": capped}
    for kind in (SILU, GELU_TANH):
        active = room_for_rows(9, 10)
        run(team, [operations.activate(kind, x, 320, active.codes, active.scales)], tokens=9)
        out |= {f"activate {kind} codes": active.codes, f"activate {kind} scales": active.scales}
    return out


def _attention(team: Team) -> dict[str, np.ndarray]:
    generator, out = np.random.default_rng(2), {}
    shape, parts = (6, 2, 64), [Chunk(1, 0, 40), Chunk(0, 33, 1)]
    for kv_type in (np.float32, HALF):
        kv = Pools.empty(generator, layers=1, rows=2, length=50, keys=2, size=64, kv_type=kv_type)
        cached = generator.standard_normal((33, 2, 2, 64)).astype(np.float32)
        kv.pools[0, kv.table[0, :33]] = as_kept(cached, kv_type)
        x = generator.standard_normal((41, 10 * 64)).astype(np.float32)
        attended = np.empty((41, 6 * 64), np.float32)
        size, name = kv.pools.itemsize, np.dtype(kv_type).name
        norm = generator.uniform(0.5, 2.0, (8, 64)).astype(np.float32), 1e-6
        heads = operations.heads(x, shape, norm=norm, rotation=None, scale=0.2, layer=0, kv_bytes=size)
        attend = operations.attend(x, shape, attended, window=20, cap=5.0, layer=0, kv_bytes=size)
        run_attention(team, [heads, attend], shape, parts, kv)
        out |= {f"heads {name}": x, f"attended {name}": attended, f"pool {name}": kv.pools}
    return out


if __name__ == "__main__":
    if sys.argv[2:] and (failed := pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]])):
        sys.exit(int(failed))
    np.savez(sys.argv[1], **results())
