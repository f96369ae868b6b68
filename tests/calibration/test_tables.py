"""Rules, storage of tables, points and AIConfigurator's tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from calibration.errors import TraceError
from calibration.importers import import_trace
from calibration.importers.aic import read_aic, version_key
from calibration.importers.aic_tables import TABLES
from calibration.points import read_points, summarise_points, write_points
from calibration.rules import load_rules
from calibration.storage import METADATA_KEY, kind_of, read_kernels, write_kernels
from calibration.trace import COLUMNS
from engine.core.specs import COMPONENTS
from tests.calibration.trace_files import write_kineto

RULES = load_rules()


@pytest.mark.parametrize(
    ("kernel", "component"),
    [
        ("void deep_ep::internode_ll::dispatch<true, false, 7168>(void*)", "dispatch"),
        ("void deep_ep::internode_ll::combine<false, 7168, 9>(void*)", "combine"),
        ("void deep_ep::intranode::cached_notify_combine<8>(void**)", "combine"),
        ("void deep_ep::intranode::notify_dispatch<8>(int const*)", "dispatch"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", None),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)", "all_reduce"),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u, 7168u, 1u, (deep_gemm::GemmType)0>(float*)", "projection"),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u, 7168u, 256u, (deep_gemm::GemmType)2>(float*)", "expert_gemm"),
        ("void deep_gemm::sm100_m_grouped_fp8_gemm_masked_1d1d_impl(int)", "expert_gemm"),
        ("void deep_gemm::sm90_fp8_paged_mqa_logits<64u>(int)", "indexer"),
        ("void sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel<64>(int)", "attention.sparse"),
        ("void flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576, 64, 64>>(int)", "attention.full"),
        ("void flash_fwd_mla_combine_kernel<cutlass::bfloat16_t, 512>(int)", "attention.full"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<int>>>(int)", "attention.full"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<1u, 2u>(int)", "attention.full"),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __half>(int)", "norm"),
        ("void flashinfer::sampling::TopKTopPSamplingFromProbKernel<512u>(int)", "sampler"),
        ("void flashinfer::AppendPagedKVCacheKernel<128u, 8u>(int)", "kv_write"),
        ("fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausal", "attention.full"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<int>>>(int)", "expert_gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64>(int)", "projection"),
        ("nvjet_tst_128x64_64x8_1x2_h_bz_TNT", "projection"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(int)", "projection"),
        ("fused_moe_kernel", "expert_gemm"),
        ("void moe_align_block_size_kernel<int>(int*)", "router"),
        ("void vllm::moe::topkGatingSoftmax<4, 128, 4>(float const*)", "router"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(int)", "kv_write"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16>(int)", "dense_ffn"),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>(int)", "projection"),
        ("tf32_hc_prenorm_gemm_kernel", "mhc"),
        ("Memcpy HtoD (Pinned -> Device)", "other"),
        ("Memcpy PtoP (Device -> Device)", "kv_transfer"),
        ("void at::native::vectorized_elementwise_kernel<4, int>(int)", None),
        ("aten::linear", "projection"),
        ("gloo:all_reduce", "all_reduce"),
    ],
)
def test_default_rules(kernel: str, component: str | None) -> None:
    assert RULES.component(kernel) == component


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('version = 2\nrule = []', "version 2"),
        ('version = 1\n[[rule]]\npattern = "("\ncomponent = "norm"', "rule 1: '\\('"),
        ('version = 1\n[[rule]]\npattern = "x"\ncomponent = "norms"', "component 'norms' is unknown"),
        ('version = 1\n[[rule]]\npattern = "x"\ncomponent = "norm"\nstream = 7', "unknown field"),
        ("version = ", "not a rules file"),
    ],
)  # fmt: skip
def test_rules_files_at_fault(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(TraceError, match=says):
        load_rules(path)


def test_tables_come_back_as_they_were(tmp_path: Path) -> None:
    table = import_trace([write_kineto(tmp_path / "t.json")], RULES)
    path = tmp_path / "t.parquet"
    write_kernels(path, table)
    back = read_kernels(path)
    for column in COLUMNS:
        if column not in ("kernel", "stream", "shapes"):
            np.testing.assert_array_equal(getattr(back, column), getattr(table, column))
    for names, codes in (("kernel_names", "kernel"), ("stream_names", "stream"), ("shape_names", "shapes")):
        spelled = [[getattr(one, names)[code] for code in getattr(one, codes)] for one in (back, table)]
        assert spelled[0] == spelled[1]
    assert back.sources == table.sources
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    # A table can be imported again, with other rules; what ranges said stays.
    other = tmp_path / "rules.toml"
    other.write_text('version = 1\n[[rule]]\npattern = "."\ncomponent = "draft"\n')
    again = import_trace([path], load_rules(other))
    assert sorted({COMPONENTS[code] for code in again.component}) == ["draft", "norm", "projection"]
    assert again.unclassified_share == 0


def spoiled(tmp_path: Path, case: str) -> Path:
    path = tmp_path / "t.parquet"
    write_kernels(path, import_trace([write_kineto(tmp_path / "t.json")], RULES))
    rows = pq.read_table(path)
    header = msgspec.json.decode(rows.schema.metadata[METADATA_KEY])
    match case:
        case "newer":
            header["schema_version"] = 99
        case "other kind":
            header["kind"] = "calibration"
        case "no header":
            pq.write_table(rows.replace_schema_metadata({}), path)
            return path
        case "truncated":
            path.write_bytes(path.read_bytes()[:-50])
            return path
        case "text":
            path.write_text("kernel,start_s\n")
            return path
        case "no column":
            rows = rows.drop_columns(["duration_s"])
        case "negative":
            rows = rows.set_column(rows.schema.get_field_index("duration_s"), "duration_s", pa.array([-1.0] * rows.num_rows))
        case "nan":
            rows = rows.set_column(rows.schema.get_field_index("start_s"), "start_s", pa.array([float("nan")] * rows.num_rows))
        case "component":
            rows = rows.set_column(rows.schema.get_field_index("component"), "component", pa.array(["x"] * rows.num_rows))
    pq.write_table(rows.replace_schema_metadata({METADATA_KEY: msgspec.json.encode(header)}), path)
    return path


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("newer", "schema version 99; this release reads 1"), ("other kind", "a table of 'calibration'"), ("no header", "somebody else's"),
        ("truncated", "broken or truncated"), ("text", "no parquet file"), ("no column", "no kernel table of this release"),
        ("negative", "duration_s of kernel"), ("nan", "start_s of kernel"), ("component", "no kernel table of this release"),
    ],
)  # fmt: skip
def test_tables_at_fault(tmp_path: Path, case: str, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        read_kernels(spoiled(tmp_path, case))


# -- AIConfigurator's tables: fixtures with the columns of aiconfigurator-core 0.12.0 ---------------------------------------------------


def aic_file(root: Path, place: str, **columns: list[Any]) -> None:
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    count = len(next(iter(columns.values())))
    common = {"framework": ["X"] * count, "version": ["9"] * count, "device": ["Test GPU"] * count, "kernel_source": ["k"] * count}
    pq.write_table(pa.table({**common, **columns}), path)


@pytest.fixture
def aic_root(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    for version, latency in (("0.5.9", [9.0, 8.0, 7.0]), ("0.5.14", [1.0, 2.0, 4.0])):
        aic_file(
            root, f"gb300/gemm/sglang/{version}/gemm_perf.parquet", op_name=["gemm"] * 3, gemm_dtype=["bfloat16"] * 3,
            m=[1, 1, 8 if version == "0.5.14" else 16], n=[64] * 3, k=[32] * 3, latency=latency,
        )  # fmt: skip
    aic_file(
        root, "gb300/comm/nccl/2.29.2/nccl_perf.parquet", op_name=["all_gather", "reduce_scatter"], nccl_dtype=["half", "int8"],
        num_gpus=[4, 4], message_size=[1024, 1024], latency=[0.01, 0.02],
    )  # fmt: skip
    aic_file(
        root, "gb300/comm/sglang/0.5.12/wideep_deepep_normal_perf.parquet", op_name=["normal"], node_num=[1], hidden_size=[7168],
        num_token=[64], num_topk=[8], num_experts=[256], dispatch_sms=[24], combine_sms=[24], dispatch_transmit_us=[30.0],
        dispatch_notify_us=[5.0], combine_transmit_us=[40.0], combine_notify_us=[0.0],
    )  # fmt: skip
    aic_file(
        root, "gb300/comm/sglang/0.5.14/moe_a2a_perf.parquet", op_name=["moe_a2a"] * 2, phase=["dispatch", "combine"], ep_size=[4, 4],
        num_tokens=[16, 16], transmit_us=[100.0, 200.0], notify_us=[0.0, 0.0], latency=[100.0, 200.0],
    )  # fmt: skip
    aic_file(
        root, "gb300/sparse_attention/sglang/0.5.14/dsv4_csa_topk_calib_perf.parquet", op_name=["dsv4_csa_topk_calib"] * 3,
        batch_size=[1, 2, 4], step=[8, 8, 8], latency=[0.0, 0.004, float("nan")],
    )  # fmt: skip
    aic_file(root, "gb300/gemm/vllm/0.24.0/gemm_perf.parquet", op_name=["gemm"], m=[1], n=[1], k=[1], latency=[1.0])
    aic_file(root, "gb300/novel/sglang/0.5.14/novel_perf.parquet", op_name=["novel"], latency=[1.0])
    return root


def test_aic_units_versions_and_faults(aic_root: Path, tmp_path: Path) -> None:
    table = read_aic("aic:gb300/sglang", aic_root, "0.12.0")
    found = {name: sorted(points.seconds.tolist()) for name, points in table.ops.items()}
    # gemm: the median of the newest version's two rows of (1, 64, 32); its 8 and the older version's 16 stand alone.
    assert found.pop("gemm") == pytest.approx([1.5e-3, 4e-3, 7e-3])
    assert found.pop("csa_topk") == pytest.approx([4e-6])
    assert found == {
        "nccl.all_gather": [pytest.approx(10e-6)], "nccl.reduce_scatter": [pytest.approx(20e-6)],
        "deepep_normal.dispatch": [pytest.approx(35e-6)], "deepep_normal.combine": [pytest.approx(40e-6)],
        "moe_a2a.dispatch": [pytest.approx(100e-6)], "moe_a2a.combine": [pytest.approx(200e-6)],
    }  # fmt: skip
    assert table.ops["nccl.all_gather"].numbers["message_bytes"].tolist() == [2048]
    assert table.ops["nccl.reduce_scatter"].numbers["message_bytes"].tolist() == [1024]
    assert table.ops["nccl.reduce_scatter"].info.component == "all_reduce"
    assert (table.ops["csa_topk"].info.num_dropped, table.ops["gemm"].info.num_merged) == (2, 3)
    gemm = table.ops["gemm"]
    assert gemm.select(gemm.labels["version"].equals("0.5.9")).numbers["m"].tolist() == [16]
    assert set(table.of_component("dispatch")) == {"deepep_normal.dispatch", "moe_a2a.dispatch"}

    path = tmp_path / "p.parquet"
    write_points(path, table)
    assert kind_of(path) == "points"
    back = read_points(path)
    assert summarise_points(back) == summarise_points(table)
    assert back.ops["gemm"].labels["gemm_dtype"].equals("bfloat16").all()
    assert set(back.ops["gemm"].numbers) == {"m", "n", "k"}


def test_aic_one_version(aic_root: Path) -> None:
    table = read_aic("aic:gb300/sglang/0.5.9", aic_root)
    assert sorted(table.ops["gemm"].seconds.tolist()) == pytest.approx([7e-3, 8.5e-3])
    assert "nccl.all_gather" in table.ops


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("aic:mi355x/sglang", "no such system; there are: gb300"), ("aic:gb300/tgi", "there are: sglang 0.5.12"),
        ("aic:gb300/sglang/1.0", "no such tables"), ("aic:gb300", "is not aic:SYSTEM/BACKEND"), ("aic:../sglang", "is not aic:"),
    ],
)  # fmt: skip
def test_aic_names_at_fault(aic_root: Path, name: str, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        read_aic(name, aic_root)


def test_aic_files_at_fault(aic_root: Path) -> None:
    place = "gb300/gemm/sglang/0.5.14/gemm_perf.parquet"
    aic_file(aic_root, place, op_name=["gemm"], m=[1], avg_ms=[1.0])
    with pytest.raises(TraceError, match=r"no columns \['latency'\]"):
        read_aic("aic:gb300/sglang", aic_root)
    (aic_root / place).write_bytes(b"PAR1 and then nothing")
    with pytest.raises(TraceError, match="is broken"):
        read_aic("aic:gb300/sglang", aic_root)


def test_aic_definitions_name_known_components() -> None:
    for measures in TABLES.values():
        for measure in measures:
            assert {measure.component, *measure.covers, *measure.components.values()} <= set(COMPONENTS)
    names = [measure.name for measures in TABLES.values() for measure in measures]
    assert len(names) == len(set(names))


def test_versions_in_order() -> None:
    texts = ["0.1.dev19262", "0.5.6", "0.5.6.post2", "0.5.10", "0.5.14", "1.3.0rc10", "1.3.0rc20", "1.3.0", "2.29.2"]
    assert sorted(texts, key=version_key) == texts
