"""Kernels over rows: norms, gates, and the rotation of heads with the writing of keys and values."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_kernel(x, y, weight, epsilon, size, BLOCK: tl.constexpr):
    """One row a program: y = x / rms(x) * weight, in float32."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    values = tl.load(x + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / size + epsilon)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * size + columns, (values * scale * weights).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(x, y, size, IS_SILU: tl.constexpr, BLOCK: tl.constexpr):
    """A part of one row a program: activation(gates) * ups, where a row of `x` holds `size` gates, then the ups."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(x + 2 * row * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + (2 * row + 1) * size + columns, mask=inside, other=0.0).to(tl.float32)
    # GELU: (1 + tanh(u)) / 2 = sigmoid(2 u), with u = sqrt(2 / pi) (x + .044715 x^3)
    inner = gate if IS_SILU else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(y + row * size + columns, (gate * tl.sigmoid(inner) * up).to(y.dtype.element_ty), mask=inside)


@triton.jit
def place_kernel(
    qkv,
    rotations,
    norms,
    positions,
    slots,
    columns,
    capacity,
    address,
    epsilon,
    NUM_QUERIES: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """One head of one token a program: queries and keys are normed and rotated, keys and values go into the cache.

    Elements that are rotated as a pair lie side by side. A token whose column is -1 is not there.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.load(columns + token)
    if column >= 0:
        evens = 2 * tl.arange(0, HALF)
        source = qkv + (token * (NUM_QUERIES + 2 * NUM_KEYS) + head) * (2 * HALF) + evens
        a, b = tl.load(source).to(tl.float32), tl.load(source + 1).to(tl.float32)
        if head < NUM_QUERIES + NUM_KEYS:
            if HAS_NORMS:
                scale = tl.rsqrt((tl.sum(a * a) + tl.sum(b * b)) / (2 * HALF) + epsilon)
                weight = norms + head * (2 * HALF) + evens
                a, b = a * scale * tl.load(weight).to(tl.float32), b * scale * tl.load(weight + 1).to(tl.float32)
            rotation = rotations + tl.load(positions + token) * (2 * HALF) + evens
            real, imaginary = tl.load(rotation), tl.load(rotation + 1)
            a, b = a * real - b * imaginary, a * imaginary + b * real
        if head < NUM_QUERIES:
            target = source
        else:
            held = tl.load(address).to(tl.pointer_type(qkv.dtype.element_ty))
            row = tl.load(slots + token) * (2 * NUM_KEYS) + head - NUM_QUERIES
            target = held + (row * tl.load(capacity) + column) * (2 * HALF) + evens
        tl.store(target, a.to(qkv.dtype.element_ty))
        tl.store(target + 1, b.to(qkv.dtype.element_ty))
