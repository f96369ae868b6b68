"""From a model's files to a model in memory: every tensor is checked against ``expected_tensors`` before the first is read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import torch
from torch import Tensor

from engine.core.errors import ConfigError
from engine.core.memory import ONE_RANK
from engine.core.sharding import RankPlace, held_tensors
from engine.core.specs import DenseSpec, ModelSpec
from engine.core.tensors import EMBEDDING, FP32, LINEAR, NORM, TensorSpec, expected_tensors
from engine.model import registry
from engine.model.base import Model, WeightSource
from engine.model.files import PICKLE_SUFFIXES, ModelFiles, pickle_refusal, read_json, read_model_files
from engine.parallel.experts import Routing
from engine.parallel.groups import ParallelGroups

LoadFormat = Literal["auto", "random"]
LoadReport = Callable[[int, int], None]  # parameters read, parameters there are
_STORED_DTYPES = ("BF16", "F16", "F32")
# Tensors that checkpoints carry and this release has no use for: vision towers, and rotary tables that older exports kept.
_IGNORED_PREFIXES = ("vision.", "image_")
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, and the files it came from (``files.tokenizer_json``, ``files.chat_template``)."""

    model: Model
    files: ModelFiles

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec


def load_model(
    model: str | Path | ModelFiles,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    cache_rounding: bool = True,
    load_format: LoadFormat = "auto",
    random_seed: int = 0,
    report: LoadReport | None = None,
    place: RankPlace = ONE_RANK,
    groups: ParallelGroups | None = None,
    routing: Routing = "model",
) -> LoadedModel:
    """Load a packaged model, a folder or a .gguf file, by its name or as already read; with ``load_format="random"`` only its config.

    ``cache_rounding`` applies to V4.1 (rounding of cached rows). A rank of several reads its part: ``place``, with the ``groups`` it has
    met. ``routing`` other than "model" is for measurements of V4.1. Raises ConfigError naming file, tensor, found and expected.
    """
    files = model if isinstance(model, ModelFiles) else read_model_files(model)
    device = torch.device(device)
    if load_format not in ("auto", "random"):
        raise ConfigError(f"load format is {load_format!r}; allowed: auto, random")
    if load_format == "auto":
        registry.require_weights(files.path)
    with ExitStack() as stack:
        if load_format == "random":
            weights: WeightSource = RandomWeights(files.spec, random_seed)
        elif files.is_gguf:
            from engine.model.gguf import GgufFile  # an optional package, needed for this format only

            gguf_file = GgufFile(files.path)
            gguf_file.verify()
            weights = gguf_file
        else:
            weights = SafetensorsWeights(files.path, files.spec, stack)
        if report is not None:
            weights = _ReportedWeights(weights, files.spec, place, report)
        return LoadedModel(_build(files, weights, dtype, device, cache_rounding, load_format, place, groups, routing), files)


def _build(
    files: ModelFiles,
    weights: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    cache_rounding: bool,
    load_format: LoadFormat,
    place: RankPlace,
    groups: ParallelGroups | None,
    routing: Routing,
) -> Model:
    if isinstance(files.spec, DenseSpec):
        from engine.model.dense import DenseModel

        return DenseModel(files.spec, weights, dtype=dtype, device=device, groups=groups)
    from engine.model.v41 import V41Model

    token_map = _token_map(files, load_format) if files.spec.engram else None
    return V41Model(
        files.spec,
        weights,
        dtype=dtype,
        device=device,
        cache_rounding=cache_rounding,
        token_map=token_map,
        place=place,
        groups=groups,
        routing=routing,
    )


def _token_map(files: ModelFiles, load_format: LoadFormat) -> Tensor | None:
    """The Engram class of every token id: stored beside the weights, else derived from the tokenizer; made up for random weights."""
    stored = files.path / "engram.safetensors"
    if stored.is_file():
        with ExitStack() as stack:
            file = _open(stored, stack)
            if "token_map" not in file.keys():  # noqa: SIM118 (the handle is not a dict)
                raise ConfigError(f"{stored}: tensor token_map is missing; found: {', '.join(sorted(file.keys()))}")
            token_map: Tensor = file.get_tensor("token_map")
        integers = token_map.dtype in (torch.int64, torch.int32)
        if token_map.dim() != 1 or not integers or token_map.shape[0] != files.spec.vocab_size or int(token_map.min()) < 0:
            raise ConfigError(
                f"{stored}: token_map is {token_map.dtype} {list(token_map.shape)}; expected integers >= 0 [{files.spec.vocab_size}]"
            )
        return token_map
    if files.tokenizer_json is not None:
        from tokenizers import Tokenizer

        from engine.model.v41 import build_token_map

        return build_token_map(Tokenizer.from_buffer(files.tokenizer_json))[0]
    if load_format == "random":
        assert not isinstance(files.spec, DenseSpec)
        assert files.spec.engram is not None
        return torch.arange(files.spec.vocab_size) % files.spec.engram.num_classes
    return None  # the model says what it misses


class SafetensorsWeights:
    """The tensors of a folder's safetensors files, memory-mapped and read one by one. Open while ``stack`` is."""

    def __init__(self, folder: Path, spec: ModelSpec, stack: ExitStack) -> None:
        self._files: dict[str, Any] = {}
        paths = _weight_files(folder)
        owner: dict[str, Path] = {}
        for path in paths:
            file = _open(path, stack)
            for name in file.keys():  # noqa: SIM118 (the handle is not a dict)
                if name in owner:
                    raise ConfigError(f"{path}: tensor {name} is also in {owner[name].name}")
                owner[name] = path
                self._files[name] = file
        self._verify(folder, spec, owner)

    def get(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        stored = self._files[name].get_slice(name)
        tensor: Tensor = stored[start:stop] if dim == 0 else stored[:, start:stop]
        return tensor

    def _verify(self, folder: Path, spec: ModelSpec, owner: dict[str, Path]) -> None:
        expected = expected_tensors(spec)
        for name, wanted in expected.items():
            if name not in owner:
                raise ConfigError(f"{folder}: tensor {name} is missing; expected shape {list(wanted.shape)}")
            header = self._files[name].get_slice(name)
            if tuple(header.get_shape()) != wanted.shape:
                raise ConfigError(f"{owner[name]}: tensor {name} has shape {list(header.get_shape())}; expected {list(wanted.shape)}")
            if header.get_dtype() not in _STORED_DTYPES:
                raise ConfigError(f"{owner[name]}: tensor {name} is {header.get_dtype()}; expected one of {', '.join(_STORED_DTYPES)}")
        tied = isinstance(spec, DenseSpec) and spec.tie_word_embeddings
        for name, path in owner.items():
            ignored = name.startswith(_IGNORED_PREFIXES) or name.endswith(_IGNORED_SUFFIXES) or (tied and name == "lm_head.weight")
            if name not in expected and not ignored:
                raise ConfigError(f"{path}: tensor {name} is not part of this model ({len(expected)} tensors are expected)")


def _open(path: Path, stack: ExitStack) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return stack.enter_context(safe_open(path, framework="pt", device="cpu"))
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file ({error})") from None


def _weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that model.safetensors.index.json lists."""
    index_path = folder / "model.safetensors.index.json"
    if not index_path.is_file():
        if (folder / "model.safetensors").is_file():
            return [folder / "model.safetensors"]
        pickles = sorted(path for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
        raise pickle_refusal(pickles[0]) if pickles else ConfigError(f"{folder}: neither model.safetensors nor {index_path.name} is there")
    index = read_json(index_path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError(f"{index_path}: weight_map is missing or not an object of tensor names to file names")
    paths = []
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(f"{index_path}: {name!r} is not the name of a safetensors file in the folder")
        if not (folder / name).is_file():
            raise ConfigError(f"{index_path}: the shard {name} is not in the folder")
        paths.append(folder / name)
    return paths


class _ReportedWeights:
    """Passes tensors on and tells how much of the rank's part of the model has been read, a percent at a time."""

    def __init__(self, weights: WeightSource, spec: ModelSpec, place: RankPlace, report: LoadReport) -> None:
        self._weights = weights
        self._waiting = {name: tensor.num_elements for name, tensor in held_tensors(spec, place)}
        self._total = sum(self._waiting.values())
        self._done = 0
        self._reported = 0
        self._report = report
        report(0, self._total)

    def get(self, name: str) -> Tensor:
        tensor = self._weights.get(name)
        self._count(name)
        return tensor

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        tensor = self._weights.part(name, dim, start, stop)
        self._count(name)
        return tensor

    def _count(self, name: str) -> None:
        self._done += self._waiting.pop(name, 0)
        if self._done == self._total or self._done - self._reported >= self._total // 100:
            self._reported = self._done
            self._report(self._done, self._total)


class RandomWeights:
    """Seeded weights of the right shapes, bf16 (float32 where the checkpoint is): each tensor depends on seed and name alone.

    Scales keep activations of order one: linear maps 1/sqrt(inputs), embedding rows of norm one, gains one, biases zero.
    """

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self._expected = expected_tensors(spec)
        self._seed = seed

    def get(self, name: str) -> Tensor:
        spec = self._expected[name]
        tensor = self._values(name, spec)
        return tensor if spec.kind == FP32 else tensor.to(torch.bfloat16)

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        return self.get(name).narrow(dim, start, stop - start)

    def _values(self, name: str, spec: TensorSpec) -> Tensor:
        if spec.kind == NORM or (spec.kind == FP32 and name.endswith("_scale")):
            return torch.ones(spec.shape)
        if spec.kind in (LINEAR, EMBEDDING) or (spec.kind == FP32 and len(spec.shape) == 2):
            generator = torch.Generator().manual_seed((self._seed * 0x9E3779B1 + crc32(name.encode())) % (1 << 63))
            return torch.randn(spec.shape, generator=generator).mul_(spec.shape[-1] ** -0.5)
        return torch.zeros(spec.shape)
