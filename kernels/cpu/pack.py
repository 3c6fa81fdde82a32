"""Weights from float32 into the panels of `kernels.cpu.matmul`, and rows of them back."""

from __future__ import annotations

import numpy as np

from kernels.cpu.compiled import jit
from kernels.cpu.ir import load_byte, load_float, load_half, store_byte, store_float, store_half
from kernels.cpu.matmul import CODE_BYTES, GROUP, GROUP_BYTES, PANEL

_MAX_FLOAT16 = np.float32(65504.0)
_GROUP_BYTES_4, _GROUP_BYTES_8 = GROUP_BYTES[4], GROUP_BYTES[8]
_CODE_BYTES_4, _CODE_BYTES_8 = CODE_BYTES[4], CODE_BYTES[8]


def packed_bytes(bits: int, outputs: int, inputs: int) -> int:
    return -(-outputs // PANEL) * (inputs // GROUP) * GROUP_BYTES[bits]


def pack(weight: np.ndarray, bits: int) -> tuple[np.ndarray, float]:
    """Panels of float32 [out, in] as uint8, and the rounding error: rms of the differences over that of the weights.

    `in` is a multiple of 32. Outputs that fill up the last panel are zero.
    """
    outputs, inputs = weight.shape
    assert inputs % GROUP == 0 and weight.flags.c_contiguous and weight.dtype == np.float32
    packed = np.zeros(packed_bytes(bits, outputs, inputs), np.uint8)
    wrong, whole = _pack(weight.ctypes.data, outputs, inputs // GROUP, bits, packed.ctypes.data)
    return packed, float(np.sqrt(wrong / max(whole, 1e-30)))


@jit
def _pack(weight, outputs, groups, bits, packed):
    """Squares of the differences, and of the weights."""
    wrong, whole = 0.0, 0.0
    for output in range(outputs):
        for group in range(groups):
            x = weight + 4 * GROUP * (output * groups + group)
            if bits == 4:
                wrong += _pack_4(x, packed + (output // PANEL * groups + group) * _GROUP_BYTES_4, output % PANEL)
            else:
                wrong += _pack_8(x, packed + (output // PANEL * groups + group) * _GROUP_BYTES_8, output % PANEL)
            for i in range(GROUP):
                whole += load_float(x + 4 * i) ** 2
    return wrong, whole


@jit
def _pack_4(x, group, lane):
    """Of two grids the better: from the least to the largest, as GGUF's Q4_1 has it, or from -8 to 7 steps, as Q4_0."""
    scale_at = group + _CODE_BYTES_4 + 2 * lane
    low_at = scale_at + 2 * PANEL
    least, largest = load_float(x), load_float(x)
    for i in range(GROUP):
        least, largest = min(least, load_float(x + 4 * i)), max(largest, load_float(x + 4 * i))
    scale, low = _halves(scale_at, low_at, (largest - least) / np.float32(15.0), least)
    wrong = _error_4(x, scale, low)
    step = (largest if largest > -least else least) / np.float32(-8.0)
    other_scale, other_low = _halves(scale_at, low_at, step, np.float32(-8.0) * step)
    other_wrong = _error_4(x, other_scale, other_low)
    if wrong <= other_wrong:
        scale, low = _halves(scale_at, low_at, scale, low)
    else:
        scale, low = other_scale, other_low
    for i in range(GROUP):
        code = _code(load_float(x + 4 * i), scale, low, 0, 15)
        at = group + 4 * PANEL * (i // 8) + 4 * lane + i % 4
        store_byte(at, load_byte(at) | (code << (4 * (i // 4 % 2))))
    return min(wrong, other_wrong)


@jit
def _error_4(x, scale, low):
    wrong = np.float32(0.0)
    for i in range(GROUP):
        value = load_float(x + 4 * i)
        wrong += (value - (low + scale * np.float32(_code(value, scale, low, 0, 15)))) ** 2
    return wrong


@jit
def _pack_8(x, group, lane):
    largest = np.float32(0.0)
    for i in range(GROUP):
        largest = max(largest, abs(load_float(x + 4 * i)))
    scale_at = group + _CODE_BYTES_8 + 2 * lane
    store_half(scale_at, min(largest / np.float32(127.0), _MAX_FLOAT16))
    scale = load_half(scale_at)
    low, wrong = np.float32(-128.0) * scale, np.float32(0.0)
    for i in range(GROUP):
        value = load_float(x + 4 * i)
        code = _code(value, scale, low, 1, 255)
        store_byte(group + 4 * PANEL * (i // 4) + 4 * lane + i % 4, code)
        wrong += (value - (low + scale * np.float32(code))) ** 2
    return wrong


@jit
def _halves(scale_at, low_at, scale, low):
    """Stored as float16, and read back."""
    store_half(scale_at, min(max(scale, -_MAX_FLOAT16), _MAX_FLOAT16))
    store_half(low_at, min(max(low, -_MAX_FLOAT16), _MAX_FLOAT16))
    return load_half(scale_at), load_half(low_at)


@jit
def _code(value, scale, low, least, most):
    if scale == 0.0:
        return least if most == 15 else 128
    code = np.floor((value - low) / scale + np.float32(0.5))
    return int(min(max(code, np.float32(least)), np.float32(most)))


@jit
def unpack_row(packed, bits, groups, output, factor, out):
    """The weights of one output, times `factor`, float32 [32 groups]."""
    lane = output % PANEL
    for index in range(groups):
        size = _GROUP_BYTES_4 if bits == 4 else _GROUP_BYTES_8
        group = packed + (output // PANEL * groups + index) * size
        scales = group + (_CODE_BYTES_4 if bits == 4 else _CODE_BYTES_8) + 2 * lane
        scale = load_half(scales)
        low = load_half(scales + 2 * PANEL) if bits == 4 else np.float32(-128.0) * scale
        for i in range(GROUP):
            if bits == 4:
                code = (load_byte(group + 4 * PANEL * (i // 8) + 4 * lane + i % 4) >> (4 * (i // 4 % 2))) & 15
            else:
                code = load_byte(group + 4 * PANEL * (i // 4) + 4 * lane + i % 4)
            store_float(out + 4 * (index * GROUP + i), (low + scale * np.float32(code)) * factor)


@jit
def unpack(packed, bits, groups, outputs, out):
    """All weights, float32 [outputs, 32 groups]."""
    for output in range(outputs):
        unpack_row(packed, bits, groups, output, np.float32(1.0), out + 4 * GROUP * groups * output)
