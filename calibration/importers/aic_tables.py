"""What each of AIConfigurator's tables measures: its component, what else it holds, its unit, and what is wrong with it.

Latencies are milliseconds but for the expert-parallel exchanges (``moe_a2a``, DeepEP), which are microseconds; message sizes of NCCL and of
the custom all-reduce count elements. The kernels ran alone and warm: no overlap, no launch gaps. Of aiconfigurator-core 0.12.0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MS, US = 1e-3, 1e-6


@dataclass(frozen=True, slots=True)
class Measure:
    """One operation in a table: the sum of ``seconds`` columns times ``scale``. ``split`` names a column whose values become operations
    of their own (``name.value``), with the component of ``components`` where one is given."""

    name: str
    component: str
    covers: tuple[str, ...] = ()
    seconds: tuple[str, ...] = ("latency",)
    scale: float = MS
    split: str | None = None
    components: dict[str, str] = field(default_factory=dict)
    note: str = ""


_EXCHANGE = {"dispatch": "dispatch", "combine": "combine"}
_NCCL = {"all_reduce": "all_reduce", "reduce_scatter": "all_reduce", "all_gather": "all_gather", "alltoall": "dispatch"}
_ALLTOALL = {
    "alltoall_prepare": "dispatch",
    "alltoall_dispatch": "dispatch",
    "alltoall_combine": "combine",
    "alltoall_combine_low_precision": "combine",
}
_MODULE = ("projection", "kv_write", "attention.full")
_SPARSE_MODULE = ("projection", "kv_write", "indexer", "attention.sparse")
_CSA = ("projection", "kv_write", "compressor", "indexer", "attention.sparse", "attention.window")
_HCA = ("projection", "kv_write", "compressor", "attention.sparse", "attention.window")
_DEEPEP_NOTE = "tables of DeepEP 0.5.6.post2 are the same numbers for h100_sxm and h200_sxm; only those have more than one node"
_MLA_NOTE = "on Hopper, decode with bf16 queries and fp8 KV is about 4 times slower than with bf16 KV, for an unknown reason"
_FOREIGN = "an operation of other architectures; kept for completeness"
_GEMM_NOTE = "eager-timed and graph-timed rows are mixed"
_HCA_NOTE = "also stands for pure window layers, which were not measured"
_ZERO_NOTE = "differences of two measurements: many rows were 0 and are dropped"

TABLES: dict[str, tuple[Measure, ...]] = {
    "gemm_perf": (Measure("gemm", "projection", ("projection", "shared_expert", "dense_ffn", "lm_head"), note=_GEMM_NOTE),),
    "moe_perf": (Measure("moe", "expert_gemm"),),
    "dsv4_megamoe_module_perf": (Measure("megamoe", "expert_gemm", ("dispatch", "expert_gemm", "combine")),),
    "wideep_context_moe_perf": (Measure("wideep_context_moe", "expert_gemm"),),
    "wideep_generation_moe_perf": (Measure("wideep_generation_moe", "expert_gemm"),),
    "wideep_moe_perf": (Measure("wideep_moe", "expert_gemm", split="op_name"),),
    "context_attention_perf": (Measure("context_attention", "attention.full"),),
    "generation_attention_perf": (Measure("generation_attention", "attention.full"),),
    "context_mla_perf": (Measure("context_mla", "attention.full"),),
    "generation_mla_perf": (Measure("generation_mla", "attention.full", note=_MLA_NOTE),),
    "mla_bmm_perf": (Measure("mla_bmm", "projection", split="op_name"),),
    "mla_context_module_perf": (Measure("mla_context_module", "attention.full", _MODULE),),
    "mla_generation_module_perf": (Measure("mla_generation_module", "attention.full", _MODULE, note=_MLA_NOTE),),
    "wideep_context_mla_perf": (Measure("wideep_context_mla", "attention.full", _MODULE),),
    "wideep_generation_mla_perf": (Measure("wideep_generation_mla", "attention.full", _MODULE, note=_MLA_NOTE),),
    "wideep_context_mlp_perf": (Measure("wideep_context_mlp", "shared_expert", ("shared_expert", "dense_ffn"), seconds=("avg_ms",)),),
    "wideep_generation_mlp_perf": (Measure("wideep_generation_mlp", "shared_expert", ("shared_expert", "dense_ffn"), seconds=("avg_ms",)),),
    "dsa_context_module_perf": (Measure("dsa_context_module", "attention.sparse", _SPARSE_MODULE, split="op_name"),),
    "dsa_generation_module_perf": (Measure("dsa_generation_module", "attention.sparse", _SPARSE_MODULE, split="op_name"),),
    "dsv4_csa_context_module_perf": (Measure("csa_context_module", "attention.sparse", _CSA),),
    "dsv4_csa_generation_module_perf": (Measure("csa_generation_module", "attention.sparse", _CSA),),
    "dsv4_hca_context_module_perf": (Measure("hca_context_module", "attention.sparse", _HCA, note=_HCA_NOTE),),
    "dsv4_hca_generation_module_perf": (Measure("hca_generation_module", "attention.sparse", _HCA, note=_HCA_NOTE),),
    "dsv4_hca_attn_module_perf": (Measure("hca_attention", "attention.sparse"),),
    "dsv4_paged_mqa_logits_module_perf": (Measure("paged_mqa_logits", "indexer"),),
    "dsv4_csa_topk_calib_perf": (Measure("csa_topk", "indexer", note=_ZERO_NOTE),),
    "glm5_mqa_logits_module_perf": (Measure("glm5_mqa_logits", "indexer"),),
    "glm5_topk_module_perf": (Measure("glm5_topk", "indexer", note=_ZERO_NOTE),),
    "glm5_dsa_attn_module_perf": (Measure("glm5_dsa_attention", "attention.sparse"),),
    "mhc_module_perf": (Measure("mhc", "mhc", split="op_name", note="num_sites applications a row"),),
    "computescale_perf": (Measure("computescale", "projection", note=_ZERO_NOTE),),
    "scale_matrix_perf": (Measure("scale_matrix", "projection"),),
    "nccl_perf": (Measure("nccl", "all_reduce", split="op_name", components=_NCCL),),
    "oneccl_perf": (Measure("oneccl", "all_reduce", split="op_name", components=_NCCL),),
    "custom_allreduce_perf": (Measure("custom_allreduce", "all_reduce", note="kernel_source tells eager from graph timing"),),
    "moe_a2a_perf": (Measure("moe_a2a", "dispatch", split="phase", components=_EXCHANGE, scale=US, note="one node only"),),
    "trtllm_alltoall_perf": (Measure("trtllm_alltoall", "dispatch", split="op_name", components=_ALLTOALL),),
    "wideep_deepep_ll_perf": (
        Measure("deepep_ll.dispatch", "dispatch", seconds=("dispatch_avg_t_us",), scale=US, note=_DEEPEP_NOTE),
        Measure("deepep_ll.combine", "combine", seconds=("combine_avg_t_us",), scale=US, note=_DEEPEP_NOTE),
    ),
    "wideep_deepep_normal_perf": (
        Measure("deepep_normal.dispatch", "dispatch", seconds=("dispatch_transmit_us", "dispatch_notify_us"), scale=US, note=_DEEPEP_NOTE),
        Measure("deepep_normal.combine", "combine", seconds=("combine_transmit_us", "combine_notify_us"), scale=US, note=_DEEPEP_NOTE),
    ),
    "encoder_attention_perf": (Measure("encoder_attention", "other", note=_FOREIGN),),
    "gdn_perf": (Measure("gdn", "other", split="phase", note=_FOREIGN),),
    "kda_perf": (Measure("kda", "other", split="phase", note=_FOREIGN),),
    "mamba2_perf": (Measure("mamba2", "other", split="phase", note=_FOREIGN),),
    "msa_context_module_perf": (Measure("msa_context_module", "other", note=_FOREIGN),),
    "msa_generation_module_perf": (Measure("msa_generation_module", "other", note=_FOREIGN),),
}  # fmt: skip
# Not part of a shape: who measured, and what else was measured.
NO_KEYS = frozenset({"framework", "version", "device", "op_name", "power", "power_limit", "transmit_us", "notify_us"})
MEASURED = frozenset(column for measures in TABLES.values() for measure in measures for column in measure.seconds)
DTYPE_BYTES = {"half": 2, "float16": 2, "bfloat16": 2, "float": 4, "float32": 4, "int8": 1, "fp8": 1, "uint8": 1}
