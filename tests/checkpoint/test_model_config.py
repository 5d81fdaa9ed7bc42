"""config.json and hf_quant_config.json: where the quantization settings are found, and what is refused."""

from __future__ import annotations

import json

import pytest

from weightprep.checkpoint.config import MAX_CONFIG_BYTES, find_quantization, read_config
from weightprep.errors import CheckpointError


def test_keeps_key_order_and_unknown_keys(tmp_path):
    raw = {"z": 1, "architectures": ["A"], "a": {"y": None, "b": [1.5]}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_config(tmp_path)
    assert json.dumps(dict(config.raw)) == json.dumps(raw)
    assert config.architectures == ("A",)
    assert config.quantization is None
    assert config.hf_quant_config is None


@pytest.mark.parametrize("absent", [{}, {"quantization_config": None}, {"quantization_config": {}}])
def test_no_quantization(tmp_path, absent):
    (tmp_path / "config.json").write_text(json.dumps(absent))
    assert read_config(tmp_path).quantization is None


FP8 = {"quant_method": "fp8"}
IN_TEXT = "text_config.quantization_config"


@pytest.mark.parametrize(
    ("raw", "key", "found"),
    [
        ({}, "quantization_config", None),
        ({"quantization_config": None, "compression_config": FP8}, "compression_config", FP8),
        ({"quantization_config": FP8, "text_config": {"quantization_config": {}}}, "quantization_config", FP8),
        (
            {"text_config": {"quantization_config": FP8}, "compression_config": {}},
            "text_config.quantization_config",
            FP8,
        ),
        # an empty one hides those behind it
        ({"quantization_config": {}, "text_config": {"quantization_config": FP8}}, "quantization_config", None),
        ({"quantization_config": {}, "compression_config": FP8}, "quantization_config", None),
        (
            {"text_config": {"quantization_config": {}}, "compression_config": FP8},
            "text_config.quantization_config",
            None,
        ),
    ],
)
def test_where_sglang_looks_we_look(tmp_path, raw, key, found):
    assert find_quantization(raw) == (key, found)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path).quantization == found
    spec = pytest.importorskip("sglang.srt.model_loader.checkpoint_quantization", reason="sglang is not installed")
    theirs = spec.resolve_checkpoint_quant_spec(raw)
    assert (None if theirs is None else theirs.config or None) == found
    assert theirs is None or theirs.source == key


def test_quantization_of_a_wrapper_and_of_modelopt(tmp_path):
    wrapper = {"architectures": ["W"], "text_config": {"quantization_config": {"quant_method": "x"}}}
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"exclude_modules": []}}')
    config = read_config(tmp_path)
    assert config.quantization == {"quant_method": "x"}
    assert config.hf_quant_config == {"quantization": {"exclude_modules": []}}


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ([128, 64], (128, 64)),
        (None, None),
        ("128", None),
        ([128], None),
        ([0, 1], None),
        (["a", 1], None),
        ([True, 1], None),
    ],
)
def test_block_size(tmp_path, block, expected):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": block}}))
    assert read_config(tmp_path).weight_block_size == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"a": 1, "a": 2}',
        '{"architectures": "A"}',
        '{"architectures": [1]}',
        '{"text_config": [1]}',
        '{"quantization_config": [1]}',
        '{"quantization_config": "fp8"}',
        '{"quantization_config": ""}',
        '{"quantization_config": []}',
        '{"quantization_config": false}',
        '{"x": ' + "9" * 5000 + "}",
        "[" * 200_000,
    ],
)
def test_refuses(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)


def test_size_limit_is_checked_before_reading(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_CONFIG_BYTES + 1)
    with pytest.raises(CheckpointError, match="at most"):
        read_config(tmp_path)
