"""What device a worker will use and how much memory it has, asked without importing torch into the parent process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec

from engine.core.errors import ConfigError

PROBE_TIMEOUT_S = 120.0
_PROBE = """
import json, torch
name = "{device}"
if not torch.cuda.is_available():
    print(json.dumps({{"available": False}}))
else:
    index = torch.device(name).index or 0
    free, total = torch.cuda.mem_get_info(index)
    print(json.dumps({{"available": True, "name": torch.cuda.get_device_name(index), "free": free, "total": total}}))
"""


class DeviceInfo(msgspec.Struct, frozen=True):
    """``device`` is torch's name for it; ``free_bytes`` is what a new process can allocate now."""

    device: str
    description: str
    free_bytes: int
    total_bytes: int


def resolve_device(name: str) -> DeviceInfo:
    """Turn ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` into a device that exists. Raises ConfigError otherwise."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", name):
        raise ConfigError(f"--device is {name!r}; needed: auto, cpu, cuda or cuda:N")
    if name == "cpu" or (name == "auto" and not _has_gpu_driver()):
        return _cpu()
    found = _probe_gpu("cuda:0" if name in ("auto", "cuda") else name)
    if found is not None:
        return found
    if name == "auto":
        return _cpu()
    raise ConfigError(f"--device is {name!r}, but torch sees no GPU; use --device cpu, or install torch's GPU build (README)")


def _has_gpu_driver() -> bool:
    """Cheap: probing with torch takes seconds, and most machines without a GPU have no driver either."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


def _cpu() -> DeviceInfo:
    meminfo: dict[str, int] = {}
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            key, value = line.split(":", 1)
            meminfo[key] = int(value.split()[0]) * 1024
    return DeviceInfo("cpu", "CPU", meminfo["MemAvailable"], meminfo["MemTotal"])


def _probe_gpu(device: str) -> DeviceInfo | None:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE.format(device=device)], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the GPU driver did not answer within {PROBE_TIMEOUT_S:g} s; check nvidia-smi or rocm-smi") from None
    if done.returncode != 0:
        raise ConfigError(f"--device {device}: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'the probe failed'}")
    answer = json.loads(done.stdout)
    if not answer["available"]:
        return None
    return DeviceInfo(device, answer["name"], answer["free"], answer["total"])
