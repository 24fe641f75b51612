"""Building an engine: what is refused before anything is loaded."""

import pytest

from quire.core import laboratory
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.build import build


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--device simulated", {"device": "simulated"}),
        ("--lora-mode merge", {"enable_lora": True, "lora_mode": "merge", "quantization": "none"}),
    ],
)
def test_without_the_laboratory_its_settings_say_how_to_install_it(monkeypatch, flag, settings):
    monkeypatch.setattr(laboratory, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match="pip install") as refusal:
        build(EngineConfig.of(**settings))
    assert flag in str(refusal.value)
