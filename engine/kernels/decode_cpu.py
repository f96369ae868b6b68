"""Loads decode_cpu.c: compiled once per machine and head shape, in about a second, where a C compiler is found.

``load`` returns None where there is none, and the callers' torch paths take over: nothing but speed depends on it. Set
TWINFER_NATIVE=0 to switch it off.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_SOURCE = Path(__file__).with_suffix(".c")
_MAX_BLOCK = 1024  # MAX_BLOCK of the source
_VECTOR_ROWS = 64  # as many as vectors multiply faster than torch does
# With AMX torch would be faster from about 300 on (measured with two threads on Sapphire Rapids), once it has compiled itself for a
# number of rows, which takes milliseconds at the first sight of each.
_TILE_ROWS = 256
_COMPILE_TIMEOUT_S = 60.0
_DIGEST_BYTES = 32
# No fast-math: the source says why, and NaN must stay visible, since the sampler looks for it.
_FLAGS: tuple[str, ...] = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC")


class DecodeKernels:
    """The compiled functions on bfloat16 CPU tensors; all contiguous, sizes of norms and gates multiples of 16. Outputs are new tensors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, integer, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self._rms_norm, self._silu_mul, self._decode = library.rms_norm, library.silu_mul, library.decode
        self._linear, self._wide_linear, self._forward = library.linear, library.wide_linear, library.forward
        self._rms_norm.argtypes = [pointer, pointer, pointer, integer, integer, real]
        self._silu_mul.argtypes = [pointer, pointer, integer, integer]
        self._decode.argtypes = [pointer] * 7 + [integer] * 5 + [real, integer]
        self._linear.argtypes = [pointer] * 5 + [integer] * 4
        self._wide_linear.argtypes = [pointer] * 4 + [integer] * 4
        self._forward.argtypes = [pointer] * 12 + [integer] * 7 + [real, integer]
        for function in (self._rms_norm, self._silu_mul, self._decode, self._linear, self._wide_linear, self._forward):
            function.restype = None
        library.request_tiles.restype = integer
        self.max_rows = _TILE_ROWS if library.request_tiles() else _VECTOR_ROWS
        """Rows up to which the products here are faster than torch's."""

    def rms_norm(self, x_TD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        out_TD = torch.empty_like(x_TD)
        rows, size = x_TD.shape
        self._rms_norm(out_TD.data_ptr(), x_TD.data_ptr(), gain_D.data_ptr(), rows, size, eps)
        return out_TD

    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        """silu(gate) * up of stacked [T, 2F], giving [T, F]."""
        rows, size = gate_up_TF.shape
        out_TF = gate_up_TF.new_empty((rows, size // 2))
        self._silu_mul(out_TF.data_ptr(), gate_up_TF.data_ptr(), rows, size // 2)
        return out_TF

    def decode(
        self, qkv_BC: Tensor, kv_2NJPd: Tensor, table_BM: Tensor, context_B: Tensor, turn_BQ2: Tensor, gain_Hd: Tensor | None, eps: float
    ) -> Tensor:
        """One new token per sequence: (per-head norm and) rotation of ``qkv_BC`` [B, (H + 2J) * d] in pair order, its key and value
        into the pool at position context - 1, and attention [B, H * d] over the ``context_B`` tokens then present."""
        _, num_blocks, num_kv_heads, block_size, head_dim = kv_2NJPd.shape
        sequences, width = qkv_BC.shape
        out_BD = qkv_BC.new_empty((sequences, width - 2 * num_kv_heads * head_dim))
        self._decode(
            out_BD.data_ptr(),
            qkv_BC.data_ptr(),
            kv_2NJPd.data_ptr(),
            table_BM.data_ptr(),
            context_B.data_ptr(),
            turn_BQ2.data_ptr(),
            None if gain_Hd is None else gain_Hd.data_ptr(),
            sequences,
            num_kv_heads,
            num_blocks,
            block_size,
            table_BM.shape[1],
            eps,
            torch.get_num_threads(),
        )
        return out_BD

    def linear(self, x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None, residual_TF: Tensor | None = None) -> Tensor:
        """x @ weight.T (+ bias) (+ residual), of any sizes; one rounding, at the end."""
        rows, inner = x_TD.shape
        out_TF = x_TD.new_empty((rows, weight_FD.shape[0]))
        self._linear(
            out_TF.data_ptr(),
            x_TD.data_ptr(),
            weight_FD.data_ptr(),
            None if bias_F is None else bias_F.data_ptr(),
            None if residual_TF is None else residual_TF.data_ptr(),
            rows,
            inner,
            weight_FD.shape[0],
            torch.get_num_threads(),
        )
        return out_TF

    def wide_linear(self, x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
        """The same in float32, without residual and rounding: for logits."""
        rows, inner = x_TD.shape
        out_TF = torch.empty((rows, weight_FD.shape[0]))
        bias = None if bias_F is None else bias_F.data_ptr()
        threads = torch.get_num_threads()
        self._wide_linear(out_TF.data_ptr(), x_TD.data_ptr(), weight_FD.data_ptr(), bias, rows, inner, weight_FD.shape[0], threads)
        return out_TF

    def forward(
        self, x_TD: Tensor, layers: Tensor, head: Tensor, norm_D: Tensor, pools_L2NJPd: Tensor, owner_T: Tensor | None, table_BM: Tensor,
        context_T: Tensor, turn_TQ2: Tensor, wanted_R: Tensor, scratch_values: int, eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """A whole step: float32 logits [R, V] of the wanted ones (R <= T), hidden states [R, D]
        behind them.

        ``owner_T`` is each token's sequence, a row of ``table_BM``, None for one token each; ``context_T`` the tokens it sees, itself
        included. ``x_TD``, the embeddings, is overwritten. ``layers`` and ``head`` are the source's structs Layer and Linear as int64,
        ``scratch_values`` the room a row needs beside its norms."""
        _, _, num_blocks, num_kv_heads, block_size, _ = pools_L2NJPd.shape
        rows, size = x_TD.shape
        outs = wanted_R.shape[0]
        threads = torch.get_num_threads()
        hidden_RD = x_TD.new_empty((outs, size))
        out_RV = torch.empty((outs, int(head[-1])))
        scratch = x_TD.new_empty(rows * (size * threads + scratch_values))
        self._forward(
            out_RV.data_ptr(),
            hidden_RD.data_ptr(),
            x_TD.data_ptr(),
            scratch.data_ptr(),
            layers.data_ptr(),
            norm_D.data_ptr(),
            head.data_ptr(),
            None if owner_T is None else owner_T.data_ptr(),
            table_BM.data_ptr(),
            context_T.data_ptr(),
            turn_TQ2.data_ptr(),
            wanted_R.data_ptr(),
            layers.shape[0],
            rows,
            outs,
            num_kv_heads,
            num_blocks,
            block_size,
            table_BM.shape[1],
            eps,
            threads,
        )
        return out_RV, hidden_RD


def load(head_dim: int, groups: int) -> DecodeKernels | None:
    """The kernels for one head shape, None where they cannot be had: no compiler, no such shape, switched off."""
    if head_dim % 16 or not 16 <= head_dim <= 256 or groups > 16 or os.environ.get("TWINFER_NATIVE") == "0":
        return None
    return _load(head_dim, groups)


def fits_block(block_size: int) -> bool:
    return block_size <= _MAX_BLOCK


@cache
def _load(head_dim: int, groups: int) -> DecodeKernels | None:
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None or not _SOURCE.is_file():
        return None
    openmp = _torch_openmp()
    flags = (*_FLAGS, f"-DHEAD_DIM={head_dim}", f"-DGROUPS={groups}", *(("-fopenmp",) if openmp else ()))
    try:
        if openmp is not None:
            ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
        target = _folder() / f"decode_cpu-{_key(compiler, flags)}.so"
        if _is_ours(target) and _is_whole(target.read_bytes()):
            with contextlib.suppress(OSError, AttributeError):
                return DecodeKernels(ctypes.CDLL(str(target)))
        with tempfile.TemporaryDirectory() as scratch:
            library = _compiled(compiler, flags, Path(scratch))
            _keep(library, target)
            return DecodeKernels(ctypes.CDLL(str(library)))  # stays mapped when the file goes
    except (OSError, AttributeError, subprocess.SubprocessError):
        return None


def _torch_openmp() -> str | None:
    """The GNU OpenMP runtime torch has loaded. Our code must run on the same one: two thread pools would fight over the cores."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = set(re.findall(r"/\S*libgomp[^/\s]*\.so\S*", maps))
    return paths.pop() if len(paths) == 1 else None


def _folder() -> Path:
    return Path(os.environ.get("TWINFER_CACHE") or Path.home() / ".cache" / "twinfer") / "native"


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    """Names the library of this source, these flags and this processor."""
    cpu = re.search(r"^flags\s*:.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return hashlib.sha256("\0".join((_SOURCE.read_text(), compiler, *flags, cpu.group() if cpu else "")).encode()).hexdigest()[:24]


def _is_ours(path: Path) -> bool:
    """Code is loaded only from a file and folder of this user that nobody else may write, and through no link."""
    try:
        folder, file = path.parent.lstat(), path.lstat()
    except OSError:
        return False
    owned = all(status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) for status in (folder, file))
    return owned and stat.S_ISDIR(folder.st_mode) and stat.S_ISREG(file.st_mode) and file.st_size > 0


def _is_whole(library: bytes) -> bool:
    """A kept library ends with its digest: the loader takes a truncated file, and the process dies where it is used."""
    return hashlib.sha256(library[:-_DIGEST_BYTES]).digest() == library[-_DIGEST_BYTES:]


def _compiled(compiler: str, flags: tuple[str, ...], scratch: Path) -> Path:
    unit, library = scratch / "unit.o", scratch / "library.so"
    for command in (
        [compiler, *flags, "-c", str(_SOURCE), "-o", str(unit)],
        [compiler, "-shared", str(unit), "-o", str(library), "-lm"],
    ):
        # Linked without -fopenmp on purpose: the OpenMP symbols are torch's, see _torch_openmp.
        subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S)
    return library


def _keep(library: Path, target: Path) -> None:
    """Into the cache folder, by a rename, so that processes which compile at once each see a whole file; where it cannot be, no matter."""
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, name = tempfile.mkstemp(dir=target.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(library.read_bytes() + hashlib.sha256(library.read_bytes()).digest())
            os.replace(name, target)
        except OSError:
            os.unlink(name)
            raise
