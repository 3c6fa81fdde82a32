"""Settings as `config.pbtxt` gives them: strings by key."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from backend_lib import config
from backend_lib.config import TRITON_KEYS, Settings, settings_table

SPECS = {spec.name: spec for spec in fields(Settings)}
NUMBERS = [spec for spec in SPECS.values() if "kind" in spec.metadata]
CHOICES = [spec for spec in SPECS.values() if "choices" in spec.metadata]


def error(**parameters: str) -> str:
    with pytest.raises(ValueError) as caught:
        Settings.from_parameters(parameters)
    return str(caught.value)


def test_nothing_given_is_the_defaults():
    assert Settings.from_parameters({}) == Settings()


def test_values_are_read_with_blanks_around_them():
    settings = Settings.from_parameters({"model": " /models/a b ", "max_running": " 8 ", "memory_fraction": "0.25"})
    assert (settings.model, settings.max_running, settings.memory_fraction) == ("/models/a b", 8, 0.25)


@pytest.mark.parametrize("key", sorted(TRITON_KEYS))
def test_keys_of_triton_are_left_to_triton(key):
    assert Settings.from_parameters({key: "anything"}) == Settings()


def test_an_unknown_key_is_named_with_a_suggestion():
    message = error(max_runing="3")
    assert "'max_runing' (did you mean 'max_running'?)" in message
    assert all(name in message for name in SPECS)
    assert "did you mean" not in error(zzzzzzzz="3")


@pytest.mark.parametrize("spec", NUMBERS, ids=lambda spec: spec.name)
def test_numbers_keep_to_their_bounds(spec):
    low, high = spec.metadata["low"], spec.metadata["high"]
    for bound in (low, high):
        value = getattr(Settings.from_parameters({spec.name: str(bound)}), spec.name)
        assert value == bound
        assert type(value) is spec.metadata["kind"]
    for bad in (str(low - 1), str(high + 1), "", "x", "nan", "inf", "1,000", "true"):
        message = error(**{spec.name: bad})
        assert f"'{spec.name}'" in message
        assert f"from {low} to {high}" in message


@pytest.mark.parametrize("spec", NUMBERS, ids=lambda spec: spec.name)
def test_auto_is_for_numbers_worked_out_when_the_model_loads(spec):
    if spec.default is None:
        given, left = Settings.from_parameters({spec.name: "auto"}), Settings()
        assert getattr(given, spec.name) == getattr(left, spec.name)
        assert "or 'auto'" in error(**{spec.name: "x"})
    else:
        assert "auto" not in error(**{spec.name: "auto"}).partition(";")[2]


@pytest.mark.parametrize("spec", CHOICES, ids=lambda spec: spec.name)
def test_choices(spec):
    for choice in spec.metadata["choices"]:
        assert getattr(Settings.from_parameters({spec.name: choice}), spec.name) == choice
    for bad in ("", "nothing", spec.default.upper()):
        message = error(**{spec.name: bad})
        assert message == f"parameter '{spec.name}' is '{bad}'; allowed are {', '.join(spec.metadata['choices'])}"


def test_an_empty_model_is_refused():
    assert error(model="  ") == "parameter 'model' is ''; allowed is text"


def test_defaults_are_what_their_own_checks_allow():
    for spec in SPECS.values():
        written = "auto" if spec.default is None else str(spec.default)
        assert getattr(Settings.from_parameters({spec.name: written}), spec.name) == getattr(Settings(), spec.name)
        assert spec.metadata["help"]


def test_what_a_gpu_gets_more_of(monkeypatch):
    """By the setting `device`, or where the driver shows one that nobody hid."""

    def sizes(**settings):
        made = Settings(**settings)
        return made.max_running, made.memory_fraction, made.prefill_chunk

    on_cpu, on_gpu = (32, 0.5, 256), (256, 0.9, 4096)
    assert sizes(device="cuda") == on_gpu and sizes(device="cpu") == sizes(device="interpret") == on_cpu
    assert sizes(device="cuda", max_running=8) == (8, 0.9, 4096)
    monkeypatch.setattr(config, "_DRIVER", Path("/dev/null"))
    assert sizes() == on_gpu
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert sizes() == on_cpu
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert sizes() == on_gpu
    monkeypatch.setattr(config, "_DRIVER", Path("/dev/null/nothing"))
    assert sizes() == on_cpu


def test_settings_travel_as_json():
    settings = Settings.from_parameters({"max_running": "8", "max_model_len": "1024", "device": "cpu"})
    assert Settings(**json.loads(json.dumps(settings.as_dict()))) == settings


def test_settings_are_frozen():
    with pytest.raises(FrozenInstanceError):
        Settings().model = "other"


@pytest.mark.parametrize("text", ["1_000", "٣", "0x10", "9" * 5000])
def test_only_plain_numbers_are_numbers(text):
    assert "allowed is a whole number" in error(kv_tokens=text)


def test_the_readme_has_every_setting():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert settings_table() in readme
