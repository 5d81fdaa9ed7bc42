"""verify finds every way in which a result can be wrong."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from weightprep.checkpoint.header import read_header
from weightprep.cli import app
from weightprep.convert.verify import Verdict, verify
from weightprep.synth import synthesize

KV_B = "model.layers.1.self_attn.kv_b_proj"


@pytest.fixture(scope="module", params=["inline", "sidecar"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp(request.param)
    synthesize(root / "src", layers=2, shards=3)
    arguments = ["convert", str(root / "src"), str(root / "dst"), "--layout", request.param, "--link", "copy"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    return root / "src", root / "dst"


@pytest.fixture
def spoiled(pair: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    shutil.copytree(pair[1], tmp_path / "dst")
    return pair[0], tmp_path / "dst"


def home(root: Path) -> Path:
    """Where the converted tensors are."""
    return root / "weightprep" if (root / "weightprep").exists() else root


def file_of(directory: Path, name: str) -> Path:
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118  (not a mapping)
                return path
    raise AssertionError(name)


def edit(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data, indent=2))


def test_sound(pair: tuple[Path, Path]) -> None:
    verdict = verify(*pair)
    assert verdict.findings == ()
    assert (verdict.modules, verdict.files) == (3, 4)
    assert verdict.tensors == sum(len(read_header(path).tensors) for path in pair[1].rglob("*.safetensors"))
    assert verdict.notes == ()


@pytest.mark.parametrize("name", ["/dev/stdin", "../glm_moe_dsa.yaml", "x.yaml", "", "glm_moe_dsa\n"])
def test_a_recipe_that_the_manifest_names_by_path_is_not_opened(spoiled: tuple[Path, Path], name: str) -> None:
    source, destination = spoiled
    edit(destination / "weightprep.json", lambda manifest: manifest.update(recipe=name))
    verdict = verify(source, destination)
    assert [finding.subject for finding in verdict.findings] == [f"{destination / 'weightprep.json'}: recipe"]


def test_hard_links_are_told_of_and_not_counted(spoiled: tuple[Path, Path]) -> None:
    source, destination = spoiled
    before = verify(source, destination)
    linked = [path for path in source.glob("*.safetensors") if _same(path, destination / path.name)]
    for path in linked:
        (destination / path.name).unlink()
        os.link(path, destination / path.name)

    verdict = verify(source, destination)

    assert verdict.findings == ()
    # inline, every shard of this model is rewritten
    assert bool(linked) == (home(destination) != destination)
    note = f"{len(linked)} shard(s) are the source's own files (hard links): nothing to compare them with"
    assert verdict.notes == ((note,) if linked else ())
    assert verdict.tensors == before.tensors - sum(len(read_header(path).tensors) for path in linked)


def _same(path: Path, copy: Path) -> bool:
    return path.read_bytes() == copy.read_bytes()


def test_every_flipped_bit_is_found(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Each time one bit of one tensor, untouched, converted or a scale, anywhere in it."""
    source, result = pair
    chance = random.Random(1)
    kinds = {"untouched": 0, "converted": 0, "scale": 0}
    directories = {result, home(result)}
    tensors = [
        (path, header.data_start, info)
        for directory in sorted(directories)
        for path in sorted(directory.glob("*.safetensors"))
        for header in [read_header(path)]
        for info in header.tensors.values()
    ]
    made = [entry for entry in tensors if entry[2].dtype == "F8_E4M3" or "weight_scale" in entry[2].name]
    for number in range(30):
        path, start, info = chance.choice(made if number % 3 else tensors)
        with path.open("r+b") as file:
            position = start + info.begin + chance.randrange(info.nbytes)
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))
            file.flush()
            verdict = verify(source, result)
            file.seek(position)
            file.write(bytes([byte]))
        assert any(info.name in finding.subject for finding in verdict.findings), info.name
        kinds["scale" if "scale" in info.name else "converted" if info.dtype == "F8_E4M3" else "untouched"] += 1
    assert min(kinds.values()) > 2
    assert verify(source, result).findings == ()


def drop_untouched(root: Path) -> None:
    path = file_of(root, "model.norm.weight")
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def drop_converted(root: Path) -> None:
    path = file_of(home(root), f"{KV_B}.weight")
    tensors = load_file(path)
    del tensors[f"{KV_B}.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def tensor_in_two_shards(root: Path) -> None:
    path = file_of(root, "model.norm.weight")
    other = next(p for p in sorted(root.glob("model-*.safetensors")) if p != path)
    tensors = load_file(other)
    tensors["model.norm.weight"] = load_file(path)["model.norm.weight"]
    save_file(tensors, other, metadata={"format": "pt"})


def unknown_tensor(root: Path) -> None:
    path = file_of(home(root), f"{KV_B}.weight")
    tensors = load_file(path)
    tensors["model.surprise.weight"] = tensors[f"{KV_B}.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})


def lying_index(root: Path) -> None:
    def swap(index: dict[str, dict[str, str]]) -> None:
        shards = sorted(set(index["weight_map"].values()))
        was = index["weight_map"]["model.norm.weight"]
        index["weight_map"]["model.norm.weight"] = next(shard for shard in shards if shard != was)

    edit(root / "model.safetensors.index.json", swap)


def index_with_a_ghost(root: Path) -> None:
    edit(
        root / "model.safetensors.index.json", lambda index: index["weight_map"].update({"ghost": "model.safetensors"})
    )


def lying_total(root: Path) -> None:
    edit(root / "model.safetensors.index.json", lambda index: index["metadata"].update({"total_size": 1}))


def config_edited(root: Path) -> None:
    edit(root / "config.json", lambda config: config.update({"num_hidden_layers": 5}))


def config_gone(root: Path) -> None:
    (root / "config.json").unlink()


def file_missing(root: Path) -> None:
    (root / "generation_config.json").unlink()


def file_edited(root: Path) -> None:
    (root / "README.md").write_text("other")


def shard_missing(root: Path) -> None:
    file_of(root, "model.norm.weight").unlink()


def shard_truncated(root: Path) -> None:
    path = file_of(root, "model.norm.weight")
    os.truncate(path, path.stat().st_size - 1)


def shard_no_safetensors(root: Path) -> None:
    file_of(root, "model.norm.weight").write_bytes(b"\0" * 100)


def manifest_gone(root: Path) -> None:
    (root / "weightprep.json").unlink()


def manifest_figures(root: Path) -> None:
    edit(root / "weightprep.json", lambda manifest: manifest["modules"][0]["quality"].update({"sqnr_db": 99.0}))


def manifest_scale(root: Path) -> None:
    edit(root / "weightprep.json", lambda manifest: manifest["modules"][0].update({"scale": 1.0}))


def manifest_without_a_module(root: Path) -> None:
    edit(root / "weightprep.json", lambda manifest: manifest["modules"].pop())


def manifest_of_another_recipe(root: Path) -> None:
    edit(root / "weightprep.json", lambda manifest: manifest.update({"recipe_hash": "0" * 64}))


def manifest_reversed(root: Path) -> None:
    edit(root / "weightprep.json", lambda manifest: manifest["modules"].reverse())


def manifest_with_a_record_twice(root: Path) -> None:
    edit(root / "weightprep.json", lambda manifest: manifest["modules"].append(manifest["modules"][0]))


def manifest_spaced(root: Path) -> None:
    with (root / "weightprep.json").open("ab") as file:
        file.write(b" ")


def header_of(path: Path) -> tuple[dict[str, dict[str, object]], bytes]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def rewrite(path: Path, header: str, data: bytes) -> None:
    path.unlink()
    path.write_bytes(struct.pack("<Q", len(header.encode())) + header.encode() + data)


def header_edited(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        path = file_of(root, "model.norm.weight")
        header, data = header_of(path)
        change(header["model.norm.weight"])
        rewrite(path, json.dumps(header), data)

    return spoil


def header_with_a_key_twice(root: Path) -> None:
    path = file_of(root, "model.norm.weight")
    header, data = header_of(path)
    twice = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})[:-1]
    rewrite(path, twice + ", " + json.dumps(header)[1:], data)


def header_without_metadata(root: Path) -> None:
    path = file_of(root, "model.norm.weight")
    header, data = header_of(path)
    del header["__metadata__"]
    rewrite(path, json.dumps(header), data)


def header_nested_deeply(root: Path) -> None:
    rewrite(file_of(root, "model.norm.weight"), "[" * 100_000, b"")


def header_with_an_infinite_size(root: Path) -> None:
    path = file_of(root, "model.norm.weight")
    header, data = header_of(path)
    header["model.norm.weight"]["shape"] = ["SIZE"]
    rewrite(path, json.dumps(header).replace('"SIZE"', "1e400"), data)


def index_with_a_key_twice(root: Path) -> None:
    path = root / "model.safetensors.index.json"
    opening = '"weight_map": {'
    text = path.read_text()
    path.write_text(text.replace(opening, opening + '"model.norm.weight": "evil.safetensors", ', 1))


def index_nested_deeply(root: Path) -> None:
    (root / "model.safetensors.index.json").write_text("[" * 100_000)


def index_gone(root: Path) -> None:
    (root / "model.safetensors.index.json").unlink()


def index_with_more(root: Path) -> None:
    edit(root / "model.safetensors.index.json", lambda index: index.update({"more": 1}))


def index_total_as_text(root: Path) -> None:
    edit(
        root / "model.safetensors.index.json",
        lambda index: index["metadata"].update({"total_size": str(index["metadata"]["total_size"])}),
    )


def index_is_a_pipe(root: Path) -> None:
    index_gone(root)
    os.mkfifo(root / "model.safetensors.index.json")


def shard_is_a_pipe(root: Path) -> None:
    path = file_of(root, "model.norm.weight")
    path.unlink()
    os.mkfifo(path)


def shard_is_a_link(root: Path) -> None:
    path = file_of(root, "model.norm.weight")
    path.rename(root.parent / path.name)
    path.symlink_to(root.parent / path.name)


SPOILERS = [
    manifest_reversed,
    manifest_with_a_record_twice,
    manifest_spaced,
    header_with_an_infinite_size,
    header_edited(lambda entry: entry.update(shape=[float(size) for size in entry["shape"]])),
    header_edited(lambda entry: entry.update(data_offsets=[str(offset) for offset in entry["data_offsets"]])),
    header_edited(lambda entry: entry.update(more=1)),
    header_with_a_key_twice,
    header_without_metadata,
    header_nested_deeply,
    index_with_a_key_twice,
    index_nested_deeply,
    index_gone,
    index_with_more,
    index_total_as_text,
    index_is_a_pipe,
    shard_is_a_pipe,
    shard_is_a_link,
    drop_untouched,
    drop_converted,
    tensor_in_two_shards,
    unknown_tensor,
    lying_index,
    index_with_a_ghost,
    lying_total,
    config_edited,
    config_gone,
    file_missing,
    file_edited,
    shard_missing,
    shard_truncated,
    shard_no_safetensors,
    manifest_gone,
    manifest_figures,
    manifest_scale,
    manifest_without_a_module,
    manifest_of_another_recipe,
]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_finds(spoiled: tuple[Path, Path], spoil: Callable[[Path], None]) -> None:
    source, result = spoiled
    spoil(result)

    outcome = CliRunner().invoke(app, ["verify", str(source), str(result), "--json"])

    assert outcome.exit_code == 1
    document = json.loads(outcome.stdout)
    assert not document["ok"]
    assert document["findings"]


def test_config_that_hides_a_scale(spoiled: tuple[Path, Path]) -> None:
    """kv_b_proj back on the exclude list: a loader would take the fp8 bytes for numbers without a scale."""
    source, result = spoiled
    config = json.loads((result / "config.json").read_text())
    if "quantization_config" not in config:
        return
    config["quantization_config"]["modules_to_not_convert"].append(KV_B)
    (result / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    assert [finding for finding in verify(source, result).findings if "config.json" in finding.subject]


@pytest.mark.parametrize(
    ("change", "place", "found", "wanted"),
    [
        (lambda text: text + "\n", "", "same content, other bytes", "the bytes that convert writes"),
        (lambda text: text.replace('"fp8"', '"fp9"'), ": quantization_config.quant_method", "'fp9'", "'fp8'"),
        (lambda text: text.replace("{", '{"more": 1,', 1), ": more", "1", "no such key"),
        (
            lambda text: text.replace('"num_hidden_layers": 2', '"num_hidden_layers": "2"'),
            ": num_hidden_layers",
            "'2'",
            "2",
        ),
        (lambda text: text[:-3], "", "Expecting", "the source's, edited by convert"),
    ],
)
def test_a_config_that_differs_is_told_by_its_key(
    tmp_path: Path, change: Callable[[str], str], place: str, found: str, wanted: str
) -> None:
    source = synthesize(tmp_path / "src", layers=2, shards=1, encoding="fp8_block")
    arguments = ["convert", str(source), str(tmp_path / "dst"), "--requantize"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    config = tmp_path / "dst" / "config.json"
    config.write_text(change(config.read_text()))
    finding, *more = verify(source, tmp_path / "dst").findings
    assert finding.subject == f"{config}{place}"
    # what a loader makes of that key, or of no key at all, is a finding of its own
    assert bool(more) == (found in ("'fp9'", "Expecting"))
    assert finding.found.startswith(found)
    assert finding.wanted == wanted


def test_source_that_changed_makes_a_sidecar_stale(pair: tuple[Path, Path], tmp_path: Path) -> None:
    source, result = pair
    shutil.copytree(source, tmp_path / "src")
    path = file_of(tmp_path / "src", f"{KV_B}.weight")
    tensors = load_file(path)
    tensors[f"{KV_B}.weight"][3, 5] += 1
    save_file(tensors, path, metadata={"format": "pt"})

    verdict: Verdict = verify(tmp_path / "src", result)

    assert any("the source has changed since" in finding.wanted for finding in verdict.findings)


def test_result_that_is_no_directory_is_a_usage_error(pair: tuple[Path, Path], tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["verify", str(pair[0]), str(tmp_path / "nothing")]).exit_code == 2


@pytest.mark.parametrize(
    "name",
    ["evil.py", "pytorch_model.bin", "hf_quant_config.json", "adapter_config.json", "sub/model.safetensors", "a.TMP"],
)
def test_file_too_many(spoiled: tuple[Path, Path], name: str) -> None:
    source, result = spoiled
    (result / name).parent.mkdir(exist_ok=True)
    (result / name).write_text("{}")
    found = verify(source, result).findings
    assert [(Path(finding.subject), finding.found) for finding in found] == [
        (result / name, "a file that nothing accounts for")
    ]


def test_bookkeeping_of_git_is_no_content(spoiled: tuple[Path, Path]) -> None:
    source, result = spoiled
    (result / ".git").mkdir()
    (result / ".git" / "HEAD").write_text("ref: refs/heads/main")
    assert verify(source, result).findings == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quality_loss_allowed", True),
        ("below_floor", [KV_B]),
        ("dropped", ["model.norm.weight"]),
        ("nextn", "keep"),
        ("recipe_hash", "0" * 64),
        ("recipe", "deepseek_v3"),
        ("precision", "bf16"),
        ("precision", None),
        ("precision", "fp8"),
        ("precision", {"decoder": "fp8"}),
        ("precision", "int3"),
    ],
)
def test_manifest_field_that_is_not_so(spoiled: tuple[Path, Path], key: str, value: object) -> None:
    source, result = spoiled
    paths = [path for path in (result / "weightprep.json", result / "weightprep/manifest.json") if path.exists()]
    for path in paths:
        text = json.loads(path.read_text()) | {key: value}
        path.write_text(json.dumps(text, indent=2, ensure_ascii=False) + "\n")
    assert CliRunner().invoke(app, ["verify", str(source), str(result)]).exit_code == 1


@pytest.mark.parametrize("field", ["module", "layer", "group", "file", "source_encoding", "target_encoding", "scale"])
def test_record_field_that_is_not_so(spoiled: tuple[Path, Path], field: str) -> None:
    source, result = spoiled

    def change(manifest: dict[str, list[dict[str, object]]]) -> None:
        record = manifest["modules"][1]
        record[field] = f"{record[field]}x" if isinstance(record[field], str) else record[field] + 1

    for path in (result / "weightprep.json", result / "weightprep/manifest.json"):
        if path.exists():
            edit(path, change)
            path.write_text(path.read_text() + "\n")
    found = verify(source, result).findings
    assert found
    assert all("not written as" not in finding.found for finding in found)


def test_missing_shard_is_named_first_and_its_tensors_are_not(spoiled: tuple[Path, Path]) -> None:
    source, result = spoiled
    path = file_of(result, "model.norm.weight")
    path.unlink()
    found = verify(source, result).findings
    assert (found[0].subject, found[0].found) == (str(path), "no such file")
    assert len(found) == 1


def test_another_release_is_no_fault(spoiled: tuple[Path, Path]) -> None:
    source, result = spoiled
    for path in (result / "weightprep.json", result / "weightprep/manifest.json"):
        if path.exists():
            text = json.loads(path.read_text()) | {"tool_version": "9.9"}
            path.write_text(json.dumps(text, indent=2, ensure_ascii=False) + "\n")
    verdict = verify(source, result)
    assert verdict.findings == ()
    assert "9.9" in verdict.notes[0]


class Watched:
    """Progress that keeps books."""

    def __init__(self) -> None:
        self.total = 0
        self.sizes: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self.open: list[str] = []

    @contextlib.contextmanager
    def watch(self, total: int) -> Iterator[Watched]:
        self.total = total
        yield self

    def begin(self, file: str, nbytes: int) -> None:
        self.open.append(file)
        self.sizes[file] = self.sizes.get(file, 0) + nbytes

    def advance(self, file: str, nbytes: int) -> None:
        assert self.open == [file]
        self.done[file] = self.done.get(file, 0) + nbytes

    def end(self, file: str) -> None:
        self.open.remove(file)


def test_progress_adds_up(pair: tuple[Path, Path]) -> None:
    watched = Watched()
    assert verify(*pair, watch=watched.watch).findings == ()
    assert watched.open == []
    assert watched.done == watched.sizes
    assert sum(watched.done.values()) == watched.total > 0


def test_workers_find_the_same_in_the_same_order(spoiled: tuple[Path, Path]) -> None:
    source, result = spoiled
    for path in sorted(result.rglob("*.safetensors")):
        data = bytearray(path.read_bytes())
        for position in range(len(data) - 1, len(data) // 2, -50_000):
            data[position] ^= 1
        path.write_bytes(data)
    alone = verify(source, result, workers=1)
    assert len(alone.findings) > 10
    assert verify(source, result, workers=4) == alone


def test_swapped_arguments(pair: tuple[Path, Path]) -> None:
    outcome = CliRunner().invoke(app, ["verify", str(pair[1]), str(pair[0])])
    assert outcome.exit_code == 1
    assert "are the arguments swapped?" in outcome.output


def test_floor_is_judged_and_a_waiver_is_told(tmp_path: Path) -> None:
    """A floor that fp8 cannot reach: refused, converted when allowed, and verify says so."""
    source = synthesize(tmp_path / "src", layers=1, shards=1)
    text = (Path(__file__).parents[2] / "configs" / "glm_moe_dsa.yaml").read_text()
    (tmp_path / "glm_moe_dsa.yaml").write_text(text.replace("min_sqnr_db: 28", "min_sqnr_db: 90"))
    arguments = [str(source), str(tmp_path / "dst"), "--recipe", str(tmp_path / "glm_moe_dsa.yaml")]
    runner = CliRunner()
    assert runner.invoke(app, ["convert", *arguments]).exit_code == 1
    assert runner.invoke(app, ["convert", *arguments, "--allow-quality-loss"]).exit_code == 0

    # the manifest's word is not enough: whoever can write a result can write that too
    outcome = runner.invoke(app, ["verify", *arguments])
    assert outcome.exit_code == 1
    assert "at least 90 dB (or --allow-quality-loss" in outcome.output
    outcome = runner.invoke(app, ["verify", *arguments, "--allow-quality-loss"])
    assert outcome.exit_code == 0, outcome.output
    assert "2 module(s) below the recipe's floor" in outcome.output

    manifest = tmp_path / "dst" / "weightprep.json"
    manifest.write_text(manifest.read_text().replace('"quality_loss_allowed": true', '"quality_loss_allowed": false'))
    outcome = runner.invoke(app, ["verify", *arguments, "--allow-quality-loss"])
    assert outcome.exit_code == 1
    assert "at least 90 dB" in outcome.output


def test_tensor_too_many_that_the_index_names(spoiled: tuple[Path, Path]) -> None:
    source, result = spoiled
    unknown_tensor(result)
    if home(result) == result:
        shard = file_of(result, "model.surprise.weight").name
        edit(
            result / "model.safetensors.index.json",
            lambda index: index["weight_map"].update({"model.surprise.weight": shard}),
        )
    found = [f.found for f in verify(source, result).findings if f.subject.endswith("model.surprise.weight")]
    assert found in (["a tensor that nothing accounts for"], ["a tensor that the recipe does not make"])
