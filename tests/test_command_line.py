"""What all commands print alike."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from engine.command_line import print_json
from engine.core.metrics import Slo


def test_json_of_what_commands_hold(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"numpy": np.float64(0.5), "struct": Slo(ttft_s=1.0), "text": "Grüße", "none": None})
    out = capsys.readouterr().out
    assert json.loads(out) == {"numpy": 0.5, "struct": msgspec.to_builtins(Slo(ttft_s=1.0)), "text": "Grüße", "none": None}
    assert out.endswith("}\n")
    assert "Grüße" in out


@pytest.mark.parametrize("value", [float("nan"), np.float64("inf")])
def test_what_json_cannot_say_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json({"a": value})
    with pytest.raises(TypeError, match="object has no form in JSON"):
        print_json({"a": object()})
