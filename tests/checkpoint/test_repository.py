"""Checkpoint directories: index and headers checked in both directions, foreign files refused, the rest carried
along.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from raw_files import INDEX, file_bytes, shard_bytes, write_checkpoint
from safetensors.torch import save_file

from weightprep.checkpoint.reader import find_module, read_tensor
from weightprep.checkpoint.repository import Checkpoint
from weightprep.errors import CheckpointError
from weightprep.formats.encoding import Encoding

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TWO_SHARDS = {ONE: ["a", "b"], TWO: ["c"]}


def refused(root: Path, *messages: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(root)
    for message in messages:
        assert message in str(caught.value)


def test_single_file_without_an_index(tmp_path):
    root = write_checkpoint(tmp_path, {"model.safetensors": ["a", "b"]})
    checkpoint = Checkpoint.open(root)
    assert checkpoint.index_path is None
    assert list(checkpoint.tensors) == ["a", "b"]
    assert list(checkpoint.shards) == ["model.safetensors"]


def test_shards_with_an_index_and_other_files(tmp_path):
    root = write_checkpoint(tmp_path, TWO_SHARDS)
    (root / "code").mkdir()
    (root / "code" / "modeling.py").write_text("")
    (root / "tokenizer.json").write_text("{}")
    (root / ".git").mkdir()
    (root / ".git" / "HEAD").write_text("")
    checkpoint = Checkpoint.open(root)
    assert checkpoint.index_path == root / INDEX
    assert {name: ref.shard for name, ref in checkpoint.tensors.items()} == {"a": ONE, "b": ONE, "c": TWO}
    assert checkpoint.other_files == (Path("config.json"), Path("tokenizer.json"), Path("code/modeling.py"))
    assert checkpoint.config.architectures == ("SomeForCausalLM",)


def test_not_a_directory(tmp_path):
    refused(tmp_path / "absent", "nothing at this path")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "a file")


def test_several_shards_without_an_index(tmp_path):
    root = write_checkpoint(tmp_path, TWO_SHARDS)
    (root / INDEX).unlink()
    refused(root, "2 .safetensors files and no", INDEX)


def test_one_numbered_shard_without_an_index(tmp_path):
    refused(write_checkpoint(tmp_path, {ONE: ["a"]}), "one shard of 2")


def test_index_names_an_absent_shard(tmp_path):
    root = write_checkpoint(tmp_path, TWO_SHARDS)
    (root / TWO).unlink()
    refused(root, TWO, "download is incomplete")


def test_tensor_in_the_index_but_not_in_its_shard(tmp_path):
    index = {"a": ONE, "b": ONE, "c": TWO, "mtp": TWO}
    refused(write_checkpoint(tmp_path, TWO_SHARDS, index=index), "'mtp'", "no shard has it")


def test_tensor_in_another_shard_than_the_index_says(tmp_path):
    refused(write_checkpoint(tmp_path, TWO_SHARDS, index={"a": ONE, "b": TWO, "c": TWO}), "'b'", f"it is in {ONE}")


def test_tensor_in_a_shard_but_not_in_the_index(tmp_path):
    refused(write_checkpoint(tmp_path, TWO_SHARDS, index={"a": ONE, "c": TWO}), "'b'", "does not name")


def test_tensor_in_two_shards(tmp_path):
    refused(write_checkpoint(tmp_path, {ONE: ["a", "b"], TWO: ["b"]}), "'b'", f"in {ONE} and in {TWO}")


def test_shard_that_the_index_does_not_name(tmp_path):
    root = write_checkpoint(tmp_path, TWO_SHARDS)
    (root / "old-00001.safetensors").write_bytes(shard_bytes(["a"]))
    refused(root, "old-00001.safetensors", "does not name")


def test_files_of_another_loader_come_along_beside_an_index(tmp_path):
    root = write_checkpoint(tmp_path, TWO_SHARDS)
    (root / "consolidated.safetensors").write_bytes(shard_bytes(["a"]))
    assert Path("consolidated.safetensors") in Checkpoint.open(root).other_files


def test_truncated_shard(tmp_path):
    root = write_checkpoint(tmp_path, TWO_SHARDS)
    os.truncate(root / TWO, (root / TWO).stat().st_size - 1)
    refused(root, TWO, "truncated")


def test_lfs_pointer(tmp_path):
    root = write_checkpoint(tmp_path, TWO_SHARDS)
    (root / TWO).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    refused(root, TWO, "git lfs pull")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_unopened(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    # Unpickling this runs `touch`.
    (tmp_path / name).write_bytes(f"cposix\nsystem\n(S'touch {tmp_path}/owned'\ntR.".encode())
    refused(tmp_path, name, "pickle")
    assert not (tmp_path / "owned").exists()


def test_no_weights_at_all(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "no .safetensors file")


def test_no_config(tmp_path):
    root = write_checkpoint(tmp_path, {"model.safetensors": ["a"]})
    (root / "config.json").unlink()
    # said before anything else that is wrong with a folder of other things
    (root / "link").symlink_to(tmp_path.parent)
    refused(root, "a directory without config.json")


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"[]",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "x", "a": "y"}}',
        b'{"weight_map": ' + b"[" * 200_000,
        b'{"weight_map": {"a": "\\ud800"}}',
        b"\xff\xfe",
    ],
)
def test_malformed_index(tmp_path, index):
    root = write_checkpoint(tmp_path, TWO_SHARDS)
    (root / INDEX).write_bytes(index)
    refused(root, INDEX)


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/passwd",
        "sub/x.safetensors",
        "..",
        ".",
        "",
        "a\0.safetensors",
        "a" * 300,
        "..\\x",
        "ü" * 200,
    ],
)
def test_file_names_of_an_index_stay_in_the_directory(tmp_path, name):
    outside = tmp_path / "x.safetensors"
    outside.write_bytes(shard_bytes(["c"]))
    root = write_checkpoint(tmp_path / "checkpoint", {ONE: ["a", "b"]}, index={"a": ONE, "b": ONE, "c": name})
    refused(root, "plain file name")


def test_symlink_out_of_the_tree(tmp_path):
    root = write_checkpoint(tmp_path / "checkpoint", TWO_SHARDS)
    outside = tmp_path / "elsewhere.safetensors"
    (root / TWO).rename(outside)
    (root / TWO).symlink_to(outside)
    refused(root, TWO, "symbolic link")


def test_any_file_that_links_out_of_the_tree_is_refused(tmp_path):
    root = write_checkpoint(tmp_path / "checkpoint", TWO_SHARDS)
    (tmp_path / "secret").write_text("")
    (root / "tokenizer.json").symlink_to("../secret")
    refused(root, "tokenizer.json", "symbolic link")


def test_link_loops_and_broken_links_and_linked_directories(tmp_path):
    for number, (name, target) in enumerate([("loop", "loop"), ("broken", "absent"), ("directory", ".")]):
        root = write_checkpoint(tmp_path / str(number), TWO_SHARDS)
        (root / name).symlink_to(target)
        refused(root, name)


def test_a_fifo_does_not_block(tmp_path):
    root = write_checkpoint(tmp_path, TWO_SHARDS)
    os.mkfifo(root / "pipe.json")
    refused(root, "pipe.json")


def test_hub_cache_links_are_followed(tmp_path):
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abc"
    write_checkpoint(snapshot, TWO_SHARDS)
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    checkpoint = Checkpoint.open(snapshot)
    assert checkpoint.tensors["c"].path.parent == blobs
    assert torch.equal(read_tensor(checkpoint.tensors["c"]).view(torch.uint8), torch.full((2, 6), 2, dtype=torch.uint8))


def test_a_snapshot_may_not_link_elsewhere_in_the_cache(tmp_path):
    snapshot = write_checkpoint(tmp_path / "models--org--name" / "snapshots" / "0123abc", TWO_SHARDS)
    other = tmp_path / "models--other" / "blobs"
    other.mkdir(parents=True)
    (snapshot / TWO).rename(other / "0")
    (snapshot / TWO).symlink_to("../../../models--other/blobs/0")
    refused(snapshot, "symbolic link")


def test_read_tensor_gives_the_bytes_of_every_dtype(tmp_path):
    tensors = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "f32": torch.randn(2, 2),
        "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "e8m0": torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "i8": torch.arange(-3, 3, dtype=torch.int8),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(1.5),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    refs = Checkpoint.open(tmp_path).tensors
    for name, expected in tensors.items():
        got = read_tensor(refs[name])
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert bytes(got.reshape(-1).view(torch.uint8)) == bytes(expected.reshape(-1).view(torch.uint8))


def test_f4_is_read_as_packed_bytes_and_f6_is_not_read(tmp_path):
    entries = {
        "f4": {"dtype": "F4", "shape": [2, 8], "data_offsets": [0, 8]},
        "f6": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [8, 11]},
    }
    (tmp_path / "model.safetensors").write_bytes(file_bytes(entries, bytes(range(11))))
    (tmp_path / "config.json").write_text("{}")
    refs = Checkpoint.open(tmp_path).tensors
    assert read_tensor(refs["f4"]).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(CheckpointError, match="F6_E2M3"):
        read_tensor(refs["f6"])


def test_a_file_that_shrank_is_noticed(tmp_path):
    root = write_checkpoint(tmp_path, {"model.safetensors": ["a"]})
    ref = Checkpoint.open(root).tensors["a"]
    os.truncate(ref.path, ref.offset + 5)
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        read_tensor(ref)


def module_checkpoint(root: Path, *files: dict[str, torch.Tensor]) -> Checkpoint:
    index = {}
    for number, tensors in enumerate(files):
        save_file(tensors, root / f"{number}.safetensors")
        index.update(dict.fromkeys(tensors, f"{number}.safetensors"))
    (root / INDEX).write_text(json.dumps({"weight_map": index}))
    (root / "config.json").write_text("{}")
    return Checkpoint.open(root)


FP8 = torch.zeros(192, 256).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("suffix", [".weight_scale_inv", ".weight_scale", "_scale_inv", ".scale"])
def test_scale_in_another_shard_under_any_name(tmp_path, suffix):
    checkpoint = module_checkpoint(tmp_path, {"l" + suffix: torch.ones(2, 2)}, {"l.weight": FP8})
    found = find_module(checkpoint.tensors, "l")
    assert found is not None
    assert found.scale is not None
    assert (found.encoded.encoding, found.encoded.block) == (Encoding.FP8_BLOCK, (128, 128))
    assert (found.weight.shard, found.scale.shard) == ("1.safetensors", "0.safetensors")


def test_absent_module_is_normal(tmp_path):
    assert find_module(module_checkpoint(tmp_path, {"l.weight": FP8}).tensors, "other") is None


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"l.weight": FP8}, "without a scale"),
        ({"l.weight_scale": torch.ones(1)}, "scale without a weight"),
        ({"l.weight": FP8, "l.weight_scale": torch.ones(2, 2), "l.weight_scale_inv": torch.ones(2, 2)}, "both"),
        ({"l.weight": FP8, "l.weight_scale_inv": torch.ones(1, 2)}, "[2, 2]"),
        ({"l.qweight": torch.zeros(4, 4, dtype=torch.int32)}, "AWQ or GPTQ"),
        ({"l.weight_packed": torch.zeros(4, 4, dtype=torch.int32)}, "pack-quantized"),
    ],
)
def test_modules_that_cannot_be_dequantized(tmp_path, tensors, message):
    with pytest.raises(CheckpointError) as caught:
        find_module(module_checkpoint(tmp_path, tensors).tensors, "l")
    assert message in str(caught.value)


def test_a_shard_whose_name_is_no_text_is_refused(tmp_path):
    """No index, manifest or journal could name it."""
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").rename(tmp_path / os.fsdecode(b"model\xff.safetensors"))
    with pytest.raises(CheckpointError, match="plain file name"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("address", "meant"),
    [
        ("https://huggingface.co/zai-org/GLM-5.2", "zai-org/GLM-5.2"),
        ("https:/huggingface.co/zai-org/GLM-5.2/", "zai-org/GLM-5.2"),
        ("https://huggingface.co/zai-org/GLM-5.2/tree/main", "zai-org/GLM-5.2"),
        ("https://hub.example:8080/zai-org/GLM-5.2/blob/v2/config.json", "zai-org/GLM-5.2@v2"),
    ],
)
def test_the_address_of_a_page_is_answered_with_the_repositorys_name(address, meant):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(Path(address))
    assert caught.value.remedy == f"use {meant}"
