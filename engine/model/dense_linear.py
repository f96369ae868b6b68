"""A linear layer in the form its device multiplies fastest."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels import decode_cpu


class Linear:
    """``x @ weight.T + bias`` for a weight [out, in]; called with x [T, in], gives [T, out].

    bfloat16 on a CPU: with ``native`` few rows go through the compiled product, which streams the plain weight once, and many through
    ``F.linear``, whose reordering of the weight (and compilation of itself, where the number of rows is new to it) is then a small
    share. Without ``native`` the weight is kept in oneDNN's blocked layout instead, twice as fast as ``F.linear`` for one row and for
    sixteen (measured on AVX512-BF16).
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, native: decode_cpu.DecodeKernels | None = None, *, shared: bool = False
    ) -> None:
        """A ``shared`` weight has another user (the embedding): it is not packed, which would be a second copy of it."""
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.native = native
        may_pack = native is None and not shared
        self.packed = may_pack and weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _has_packed_bf16()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self.packed else weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return result
        if self.native is not None and x.shape[0] <= self.native.max_rows:
            return self.native.linear(x, self.weight, self.bias)
        return functional.linear(x, self.weight, self.bias)

    def wide(self, x: Tensor) -> Tensor:
        """The product in float32, for logits. Only the compiled one is unrounded: in bfloat16 two best logits are often equal."""
        if self.native is not None and x.shape[0] <= self.native.max_rows:
            return self.native.wide_linear(x, self.weight, self.bias)
        return self(x).float()

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product plus ``residual`` [T, out], in one operation where the device has it."""
        if self.native is not None and x.shape[0] <= self.native.max_rows:
            return self.native.linear(x, self.weight, self.bias, residual)
        if self.packed or (self.native is not None and _has_packed_bf16()):  # the operation takes plain weights as well
            result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
            return result
        return functional.linear(x, self.weight, self.bias).add_(residual)

    def struct(self) -> list[int]:
        """Linear of decode_cpu.c: weight, bias, in, out."""
        return [self.weight.data_ptr(), 0 if self.bias is None else self.bias.data_ptr(), self.in_features, self.out_features]


def _has_packed_bf16() -> bool:
    return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())
