"""cuBLASLt's algorithms for one matrix product, each to be run by itself; torch brings the library and runs the first that it proposes.

Names and numbers are those of cublasLt.h (NVIDIA, "cuBLAS library", chapter "Using the cuBLASLt API").
"""

import ctypes
import functools
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from typing import Any

import torch
from torch import Tensor

TYPES = {torch.bfloat16: 14, torch.float16: 2}
REAL_32F, COMPUTE_32F = 0, 68
DESC_TRANSA, DESC_EPILOGUE, DESC_BIAS_POINTER, EPILOGUE_BIAS = 3, 7, 8, 4
PREF_MAX_WORKSPACE, PREF_REDUCTION_SCHEMES, NO_REDUCTION = 1, 3, 0
WORKSPACE = 64 * 1024
"""Bytes; without a reduction over parts of the inner axis an algorithm needs a counter at most."""
PROPOSALS = 32


class _Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Product:
    """y = a b (+ bias) for a [m, k], b [k, n] as it lies in memory or as a transposed view, bias [n]: what cuBLASLt proposes for it.

    `algorithms` says how many; none adds up parts of the inner axis apart. Raises an OSError where the library cannot be loaded, and a
    RuntimeError where it refuses.
    """

    def __init__(self, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
        library, kind = _library(), TYPES[a.dtype]
        self._handle, self._workspace = _handle(a.device), torch.empty(WORKSPACE, dtype=torch.uint8, device=a.device)
        (m, k), n = a.shape, b.shape[1]
        # The library's matrices lie column by column: it is asked for yᵀ = bᵀ aᵀ.
        transposed = b.stride(0) == 1
        self._product = _made(library.cublasLtMatmulDescCreate, COMPUTE_32F, REAL_32F)
        _set(library.cublasLtMatmulDescSetAttribute, self._product, DESC_TRANSA, c_int32(transposed))
        if bias is not None:
            _set(library.cublasLtMatmulDescSetAttribute, self._product, DESC_EPILOGUE, c_uint32(EPILOGUE_BIAS))
        rows, columns = (k, n) if transposed else (n, k)
        self._b = _made(library.cublasLtMatrixLayoutCreate, kind, c_uint64(rows), c_uint64(columns), c_int64(rows))
        self._a = _made(library.cublasLtMatrixLayoutCreate, kind, c_uint64(k), c_uint64(m), c_int64(a.stride(0)))
        self._y = _made(library.cublasLtMatrixLayoutCreate, kind, c_uint64(n), c_uint64(m), c_int64(n))
        self._proposals = self._proposed()
        self.algorithms = len(self._proposals)

    def run(self, algorithm: int, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Computes into `out` [m, n] on the current stream, by the algorithm of that number; tensors like those of the constructor."""
        library, one, zero = _library(), c_float(1.0), c_float(0.0)
        if bias is not None:
            _set(library.cublasLtMatmulDescSetAttribute, self._product, DESC_BIAS_POINTER, c_void_p(bias.data_ptr()))
        y, stream = c_void_p(out.data_ptr()), c_void_p(torch.cuda.current_stream(a.device).cuda_stream)
        _check(
            library.cublasLtMatmul(
                self._handle, self._product, byref(one), c_void_p(b.data_ptr()), self._b, c_void_p(a.data_ptr()), self._a,
                byref(zero), y, self._y, y, self._y, byref(self._proposals[algorithm].algorithm),
                c_void_p(self._workspace.data_ptr()), c_size_t(WORKSPACE), stream,
            )
        )  # fmt: skip

    def _proposed(self) -> list[_Proposal]:
        library = _library()
        preference = _made(library.cublasLtMatmulPreferenceCreate)
        setter = library.cublasLtMatmulPreferenceSetAttribute
        _set(setter, preference, PREF_MAX_WORKSPACE, c_uint64(WORKSPACE))
        _set(setter, preference, PREF_REDUCTION_SCHEMES, c_uint32(NO_REDUCTION))
        proposals, count = (_Proposal * PROPOSALS)(), c_int()
        _check(
            library.cublasLtMatmulAlgoGetHeuristic(
                self._handle, self._product, self._b, self._a, self._y, self._y, preference, PROPOSALS, proposals, byref(count)
            )
        )
        library.cublasLtMatmulPreferenceDestroy(preference)
        return [proposal for proposal in proposals[: count.value] if proposal.state == 0]


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")


@functools.cache
def _handle(device: torch.device) -> c_void_p:
    with torch.cuda.device(device):
        return _made(_library().cublasLtCreate)


def _made(create: Callable[..., int], *arguments: Any) -> c_void_p:
    found = c_void_p()
    _check(create(byref(found), *arguments))
    return found


def _set(setter: Callable[..., int], target: c_void_p, attribute: int, value: Any) -> None:
    _check(setter(target, attribute, byref(value), c_size_t(sizeof(value))))


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt returned status {status}")
