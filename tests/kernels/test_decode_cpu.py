"""The compiled products of a few rows against their definition, and how the library is made, kept and distrusted."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import decode_cpu

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="the compiled kernels are optional and need gcc")


@pytest.fixture(scope="module", params=["", "-mno-amx-bf16", "-mno-avx512bf16"], ids=["this processor", "no tiles", "plain vectors"])
def native(request: pytest.FixtureRequest) -> decode_cpu.DecodeKernels:
    """As compiled here, without AMX, and without AVX512-BF16's own product."""
    flags = decode_cpu._FLAGS
    if request.param:
        if platform.machine() != "x86_64":
            pytest.skip("there is only the plain one")
        decode_cpu._FLAGS = (*flags, request.param)
    decode_cpu._load.cache_clear()
    kernels = decode_cpu.load(16, 3)
    decode_cpu._load.cache_clear()
    decode_cpu._FLAGS = flags
    assert kernels is not None, "there is a C compiler, but decode_cpu.c did not compile or load"
    return kernels


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# -- products -----------------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(("out", "inner"), [(64, 96), (16, 32), (1, 1), (97, 48), (33, 31), (15, 577), (48, 16)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 64])
def test_products_equal_the_definition(native: decode_cpu.DecodeKernels, threads: int, out: int, inner: int, rows: int) -> None:  # noqa: ARG001
    generator = torch.Generator().manual_seed(out * inner + rows)
    x = torch.randn(rows, inner, generator=generator).to(torch.bfloat16)
    weight = torch.randn(out, inner, generator=generator).to(torch.bfloat16)
    bias, residual = (torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in ((out,), (rows, out)))
    product = x.double() @ weight.double().T
    # One rounding to 8 bits, half a unit = 2^-8 of the result's lower bound, and float32's own error on sums of ``inner`` terms.
    near = {"rtol": 2.0**-8, "atol": 2e-6 * inner**0.5 + 1e-6}
    torch.testing.assert_close(native.linear(x, weight, None).double(), product, **near)
    torch.testing.assert_close(native.linear(x, weight, bias).double(), product + bias.double(), **near)
    torch.testing.assert_close(native.linear(x, weight, bias, residual).double(), product + bias.double() + residual.double(), **near)
    wide = {"rtol": 2e-6, "atol": near["atol"]}  # no rounding but float32's own
    torch.testing.assert_close(native.wide_linear(x, weight, None).double(), product, **wide)
    torch.testing.assert_close(native.wide_linear(x, weight, bias).double(), product + bias.double(), **wide)


def tiles_exist() -> bool:
    return "amx_bf16" in Path("/proc/cpuinfo").read_text()


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 200), inner=st.integers(16, 700), out=st.integers(1, 130), threads=st.integers(1, 2), seed=st.integers(0, 99))
def test_products_of_any_size_equal_the_definition(rows: int, inner: int, out: int, threads: int, seed: int) -> None:
    kernels = decode_cpu.load(16, 3)
    assert kernels is not None
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias, residual = (
        torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in ((rows, inner), (out, inner), (out,), (rows, out))
    )
    torch.set_num_threads(threads)
    try:
        found = kernels.linear(x, weight, bias, residual)
        theirs = x @ weight.T  # torch uses the tile registers too, in a configuration of its own
        wide = kernels.wide_linear(x, weight, bias)
    finally:
        torch.set_num_threads(before)
    product = x.double() @ weight.double().T
    atol = 2e-6 * inner**0.5 + 1e-6
    torch.testing.assert_close(found.double(), product + bias.double() + residual.double(), rtol=2.0**-8, atol=atol)
    torch.testing.assert_close(theirs.double(), product, rtol=2.0**-8, atol=atol)
    torch.testing.assert_close(wide.double(), product + bias.double(), rtol=2e-6, atol=atol)


@needs_compiler
def test_many_rows_are_blocked_and_equal_few(native: decode_cpu.DecodeKernels, threads: int) -> None:  # noqa: ARG001
    """More packed rows than fit at once, and weights of two sizes of blocks."""
    generator = torch.Generator().manual_seed(5)
    for inner, rows in ((1500, 520), (5000, 200)):
        x, weight = (torch.randn(count, inner, generator=generator).to(torch.bfloat16) for count in (rows, 49))
        product = x.double() @ weight.double().T
        near = {"rtol": 4e-6, "atol": 4e-6 * inner**0.5}
        torch.testing.assert_close(native.wide_linear(x, weight, None).double(), product, **near)


@needs_compiler
@pytest.mark.skipif(not tiles_exist(), reason="this processor has no AMX")
def test_where_there_are_tiles_they_are_used() -> None:
    kernels = decode_cpu.load(16, 3)
    assert kernels is not None
    assert kernels.max_rows == decode_cpu._TILE_ROWS


@needs_compiler
@pytest.mark.parametrize("rows", [1, 2, 4, 35])
@pytest.mark.parametrize("at", [3, 40])  # in a full vector and in the last, partial one
def test_products_show_nan_and_infinity_in_their_outputs_only(native: decode_cpu.DecodeKernels, rows: int, at: int) -> None:
    x, weight = torch.ones(rows, 41, dtype=torch.bfloat16), torch.ones(35, 41, dtype=torch.bfloat16)
    weight[5, at], weight[33, at], weight[7, at] = torch.nan, torch.nan, torch.inf
    found = native.linear(x, weight, None)
    assert found.isnan().any(0).nonzero()[:, 0].tolist() == [5, 33]
    assert bool(found[:, [5, 33]].isnan().all())
    assert bool(found[:, 7].isinf().all())
    x[rows - 1, at] = torch.nan
    assert bool(native.linear(x, weight, None)[rows - 1].isnan().all())


# -- the library --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, and no kernels remembered before or after."""
    monkeypatch.setenv("TWINFER_CACHE", str(tmp_path))
    monkeypatch.delenv("TWINFER_NATIVE", raising=False)
    decode_cpu._load.cache_clear()
    yield tmp_path / "native"
    decode_cpu._load.cache_clear()


def compilations(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    calls: list[object] = []
    run = subprocess.run

    def counted(command: list[str], **options: object) -> object:
        calls.append(command)
        return run(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", counted)
    return calls


def works(kernels: decode_cpu.DecodeKernels | None) -> bool:
    ones = torch.ones(2, 32, dtype=torch.bfloat16)
    return kernels is not None and bool((kernels.linear(ones, ones, None) == 32).all())


def test_without_a_compiler_or_switched_off_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    assert decode_cpu.load(24, 1) is None
    monkeypatch.setenv("TWINFER_NATIVE", "0")
    assert decode_cpu.load(16, 3) is None
    monkeypatch.delenv("TWINFER_NATIVE")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert decode_cpu.load(32, 1) is None
    decode_cpu._load.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: name)

    def broken(*_: object, **__: object) -> None:
        raise subprocess.CalledProcessError(1, "gcc")

    monkeypatch.setattr(subprocess, "run", broken)
    assert decode_cpu.load(32, 1) is None
    assert not fresh.exists() or not list(fresh.iterdir())


@needs_compiler
def test_a_library_is_kept_and_used_again_unless_it_is_damaged(monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    calls = compilations(monkeypatch)
    assert works(decode_cpu.load(16, 1))
    (kept,) = fresh.iterdir()
    assert len(calls) == 2  # compile, link
    decode_cpu._load.cache_clear()
    assert works(decode_cpu.load(16, 1))
    assert len(calls) == 2
    whole = kept.read_bytes()
    for damage in (b"", whole[:1000], whole[:8192], whole[:-1], b"not a library" * 99):
        kept.unlink()  # another inode: the old one is mapped
        kept.write_bytes(damage)
        kept.chmod(0o600)
        decode_cpu._load.cache_clear()
        assert works(decode_cpu.load(16, 1))
        assert kept.stat().st_size == len(whole)


@needs_compiler
@pytest.mark.parametrize("how", ["file writable by all", "folder writable by all", "folder of a group", "link", "another owner"])
def test_a_library_that_others_could_have_planted_is_not_loaded(monkeypatch: pytest.MonkeyPatch, fresh: Path, how: str) -> None:
    assert works(decode_cpu.load(16, 2))
    (kept,) = fresh.iterdir()
    assert fresh.stat().st_mode & 0o077 == 0
    calls = compilations(monkeypatch)
    match how:
        case "file writable by all":
            kept.chmod(0o666)
        case "folder writable by all":
            fresh.chmod(0o777)
        case "folder of a group":
            fresh.chmod(0o770)
        case "link":
            kept.rename(fresh / "elsewhere")
            kept.symlink_to(fresh / "elsewhere")
        case "another owner":
            uid = os.geteuid()
            monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    decode_cpu._load.cache_clear()
    assert works(decode_cpu.load(16, 2))
    assert len(calls) == 2, "it was loaded"


@needs_compiler
def test_a_folder_that_cannot_be_written_costs_only_the_compilation(monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    fresh.parent.joinpath("file").write_text("")
    monkeypatch.setenv("TWINFER_CACHE", str(fresh.parent / "file"))  # no folder can be made below a file, even by root
    assert works(decode_cpu.load(16, 4))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setenv("TWINFER_CACHE", str(fresh.parent))
    monkeypatch.setattr(os, "replace", refuse)
    decode_cpu._load.cache_clear()
    assert works(decode_cpu.load(16, 4))
    assert list(fresh.iterdir()) == []


@needs_compiler
def test_processes_may_compile_at_once(fresh: Path) -> None:
    program = "from engine.kernels import decode_cpu; assert decode_cpu.load(16, 5) is not None"
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert len(list(fresh.iterdir())) == 1
