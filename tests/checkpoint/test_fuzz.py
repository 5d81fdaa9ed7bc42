"""Hostile bytes in headers, indices, configs and exclude lists: only a WeightprepError comes out, and memory stays
small.
"""

from __future__ import annotations

import json
import string
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from raw_files import INDEX, bf16, file_bytes, shard_bytes
from safetensors import SafetensorError, safe_open

from weightprep.checkpoint.config import ModelConfig, read_config
from weightprep.checkpoint.dtypes import DTYPES
from weightprep.checkpoint.exclude import read_exclude_list
from weightprep.checkpoint.header import TensorInfo, encode_header, parse_header, place, read_header
from weightprep.checkpoint.reader import read_tensor
from weightprep.checkpoint.repository import Checkpoint
from weightprep.errors import CheckpointError, WeightprepError

fuzzed = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
# Near enough to a real entry that the later checks are reached.
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "BF17"]) | json_values,
        "shape": st.lists(st.integers(-1, 9) | st.sampled_from([2**31, 2**63, 2**64]), max_size=4) | json_values,
        "data_offsets": st.lists(st.integers(-1, 40) | st.just(2**64), min_size=1, max_size=3) | json_values,
    }
)
headers = st.dictionaries(st.text(max_size=6) | st.just("__metadata__"), entries | json_values, max_size=4)
raw_files = st.one_of(
    st.binary(max_size=64),
    st.builds(file_bytes, headers, st.binary(max_size=48)),
    st.builds(lambda h, d, n: file_bytes(h, d, length=n), headers, st.binary(max_size=8), st.integers(0, 2**64 - 1)),
    st.builds(file_bytes, st.binary(max_size=64), st.binary(max_size=8)),
)


@fuzzed
@given(raw_files)
@example(struct.pack("<Q", 2**63) + b"{}")
@example(file_bytes({"a": bf16(0, 4, 2)}, bytes(4)))
def test_headers(tmp_path, content):
    """Whatever is accepted, the safetensors library accepts too, with the same tensors, and each tensor is readable."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    try:
        header = read_header(path)
    except CheckpointError:
        return
    assert header.file_size == header.data_start + sum(info.nbytes for info in header.tensors.values())
    try:
        with safe_open(path, "pt") as file:
            assert set(file.keys()) == set(header.tensors)
    except SafetensorError as error:
        pytest.fail(f"the library refuses what we accept: {error}")
    (tmp_path / "config.json").write_text("{}")
    for ref in Checkpoint.open(tmp_path).tensors.values():
        if DTYPES[ref.info.dtype].torch is not None:
            assert read_tensor(ref).nbytes == ref.nbytes


@fuzzed
@given(st.data())
def test_damaged_headers(data):
    """A correct shard with a few bytes of its header changed."""
    content = bytearray(shard_bytes(["model.layers.0.weight", "b"]))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    size = data.draw(st.sampled_from([len(content), len(content) - 1, 2**40]))
    try:
        header = parse_header(bytes(content), size, Path("x"))
    except CheckpointError:
        return
    assert sum(info.nbytes for info in header.tensors.values()) == size - header.data_start


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 5), max_size=3)


@fuzzed
@given(st.dictionaries(names, st.tuples(st.sampled_from(sorted(DTYPES)), shapes), max_size=6), st.data())
def test_what_is_written_is_read_back(tmp_path, wanted, data):
    """Any names, dtypes and shapes; sub-byte rows are filled up to whole bytes."""
    infos = []
    for name, (dtype, shape) in wanted.items():
        bits = DTYPES[dtype].bits
        full = (*shape, 8) if bits < 8 else tuple(shape)
        elements = 1
        for size in full:
            elements *= size
        infos.append(TensorInfo(name, dtype, full, 0, elements * bits // 8))
    placed = place(infos)
    metadata = data.draw(st.dictionaries(names, names, max_size=2))
    path = tmp_path / "model.safetensors"
    path.write_bytes(encode_header(placed, metadata) + bytes(sum(info.nbytes for info in infos)))
    header = read_header(path)
    assert set(header.tensors.values()) == set(placed)
    assert dict(header.metadata) == metadata
    assert header.data_start % 8 == 0
    assert all(info.begin % max(1, DTYPES[info.dtype].bits // 8) == 0 for info in placed)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(wanted)


@fuzzed
@given(json_values | st.dictionaries(st.just("weight_map"), json_values) | st.binary(max_size=40))
@example({"weight_map": {"a": "../../../etc/passwd", "b": "model.safetensors"}})
@example({"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}})
def test_indices(tmp_path, document):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(shard_bytes(["a", "b"]))
    (tmp_path / INDEX).write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())
    try:
        checkpoint = Checkpoint.open(tmp_path)
    except CheckpointError:
        return
    assert document["weight_map"] == {"a": "model.safetensors", "b": "model.safetensors"}
    assert set(checkpoint.tensors) == {"a", "b"}


keys = ["architectures", "text_config", "quantization_config"]


@fuzzed
@given(st.binary(max_size=60) | json_values | st.dictionaries(st.sampled_from(keys), json_values, max_size=3))
def test_configs(tmp_path, document):
    (tmp_path / "config.json").write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())
    try:
        config = read_config(tmp_path)
    except CheckpointError:
        return
    assert all(isinstance(name, str) for name in config.architectures)
    assert config.quantization is None or isinstance(config.quantization, dict)


exclude_texts = st.text(string.ascii_letters + r".*?[]()|+\{}^$,0123", max_size=12)


@fuzzed
@given(
    st.lists(exclude_texts | exclude_texts.map(lambda text: "re:" + text), max_size=4),
    st.sampled_from(["fp8", "quark", "compressed-tensors", "modelopt", "x"]),
)
def test_exclude_lists(texts, method):
    config = ModelConfig({}, (), {"quant_method": method, "exclude": texts}, None)
    try:
        excludes = read_exclude_list(config, ["model.layers.78"])
    except WeightprepError:
        return
    tensors = ["model.layers.78.self_attn.kv_b_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight", "", "."]
    unmatched = set(excludes.unmatched(tensors))
    for name in tensors:
        found = set(excludes.entries_for(name.removesuffix(".weight")))
        assert not found & unmatched or any("experts." in entry.text for entry in found)


LIMITED = """
import resource, sys
from pathlib import Path
from weightprep.checkpoint.repository import Checkpoint
from weightprep.errors import CheckpointError
limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 64 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for root in sys.argv[1:]:
    try:
        Checkpoint.open(root)
    except CheckpointError as error:
        print(error.found)
"""


def test_no_length_in_a_file_drives_an_allocation(tmp_path):
    """With 64 MB of address space to spare, lengths of gigabytes and exabytes are refused, not tried."""
    sizes = {"exabytes": 2**62, "a header of gigabytes": 2**32, "just above the limit": 100_000_001}
    roots = []
    for name, length in sizes.items():
        root = tmp_path / name
        root.mkdir()
        roots.append(str(root))
        (root / "config.json").write_text("{}")
        with (root / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", length) + b"{")
            # Sparse, so that the header lies inside the file and only the limit is in the way.
            file.truncate(2**33)
    huge_index = tmp_path / "index"
    huge_index.mkdir()
    roots.append(str(huge_index))
    (huge_index / "config.json").write_text("{}")
    with (huge_index / INDEX).open("wb") as file:
        file.truncate(2**33)
    done = subprocess.run([sys.executable, "-c", LIMITED, *roots], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(roots)
