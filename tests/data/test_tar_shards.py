"""Tar shards of WebDataset: read at random, in an order of shards that any number of processes and a resume share."""

import io
import json
import pickle
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from cumulant.data import DataError, Loader, TensorImages, open_source
from cumulant.data.order import by_shards
from cumulant.train import TrainRecipe, train

SIDE = 8


def image(level):
    file = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), (level, level, level)).save(file, "PNG")
    return file.getvalue()


def write_tar(path, samples):
    """Samples are tables of member name -> bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for members in samples:
            for name, content in members.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return path


def write_set(folder, train=24, test=7, per_shard=5):
    """Level 10 i of train item i, label i % 2."""
    for part, count in (("train", train), ("validation", test)):
        for number, first in enumerate(range(0, count, per_shard)):
            items = range(first, min(first + per_shard, count))
            some = [{f"{i:04d}.png": image(10 * i), f"{i:04d}.cls": str(i % 2).encode()} for i in items]
            write_tar(folder / f"{part}-{number:06d}.tar", some)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_set(tmp_path_factory.mktemp("shards"))


def test_members_are_read_with_their_labels(folder):
    source = open_source(folder)
    assert repr(source).endswith("images, 2 classes, 24 train, 7 test)")
    assert [int(source.train.decode(i, SIDE)[0, 0, 0]) for i in range(24)] == [10 * i for i in range(24)]
    assert source.train.labels.tolist() == [i % 2 for i in range(24)]
    assert source.train.name(7) == "train-000001.tar/0007"
    copied = pickle.loads(pickle.dumps(source.train))
    assert torch.equal(copied.decode(9, SIDE), source.train.decode(9, SIDE))


@pytest.fixture
def parquet(tmp_path):
    """Four shards of six pictures for training, one for testing."""
    import pyarrow
    import pyarrow.parquet

    for part, shards in (("train", 4), ("test", 1)):
        for shard in range(shards):
            table = pyarrow.table({"image": [image(10 * i) for i in range(6)], "label": [i % 2 for i in range(6)]})
            pyarrow.parquet.write_table(table, tmp_path / f"{part}-{shard:05d}-of-{shards:05d}.parquet")
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "window", "lanes"), [("folder", 0, 1), ("folder", 2, 1), ("folder", 1, 6), ("parquet", 1, 6)]
)
def test_an_epoch_in_shards_resumes_inside_on_another_number_of_processes(request, kind, window, lanes):
    part = open_source(request.getfixturevalue(kind)).train
    options = {"size": SIDE, "seed": 4, "shard_window": window, "in_memory": False, "workers": 0, "shard_lanes": lanes}
    whole = list(Loader(part, 6, **options).epoch(3))
    assert sorted(torch.cat([batch[2] for batch in whole]).tolist()) == list(range(24))
    for world in (2, 3):
        ranks = [Loader(part, 6, rank=rank, world=world, **options).epoch(3, first_step=1) for rank in range(world)]
        for shares, (pixels, labels, positions) in zip(zip(*ranks, strict=True), whole[1:], strict=True):
            assert torch.equal(torch.cat([share[0] for share in shares]), pixels)
            assert torch.equal(torch.cat([share[1] for share in shares]), labels)
            assert torch.equal(torch.cat([share[2] for share in shares]), positions)


def test_with_a_window_few_shards_are_read_at_a_time_and_every_item_comes_once():
    shards = np.repeat(np.arange(12), 50)
    orders = [by_shards(shards, 3, torch.Generator().manual_seed(seed)) for seed in range(2)]
    for order in orders:
        assert sorted(order) == list(range(600))
        assert all(len(set(shards[order[first : first + 150]])) == 3 for first in range(0, 600, 150))
        assert len(set(shards[order[:20]])) == 3  # mixed, not one after the other
    assert (orders[0] != orders[1]).any()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_with_lanes_a_process_reads_its_own_part_of_the_shards(world):
    part = TensorImages(torch.zeros(400, 3, 1, 1, dtype=torch.uint8), torch.arange(400) % 2)
    part.shard_of = np.repeat(np.arange(20), 20)
    lanes = {"shard_window": 1, "shard_lanes": 4}
    loaders = [Loader(part, 8, size=1, rank=r, world=world, in_memory=False, workers=0, **lanes) for r in range(world)]
    seen = [torch.cat([positions for *_, positions in loader.epoch(1)]).numpy() for loader in loaders]
    assert sorted(np.concatenate(seen)) == list(range(400))
    # 20 shards over the processes, and those on a border between two lanes
    assert [len(set(part.shard_of[one])) for one in seen] == [20 // world] * world
    steps = [np.stack([positions.numpy() for *_, positions in loader.epoch(1)]) for loader in loaders]
    assert all(len(set(part.shard_of[lane])) <= 2 for one in steps for lane in one[0].reshape(-1, 2))


def test_lanes_that_do_not_fit_are_refused(folder):
    part = open_source(folder).train
    for given, said in (
        ({"shard_lanes": 4}, "must be 1 unless shards are shuffled by shard_window, without repeats, got 4"),
        ({"shard_window": 1, "shard_lanes": 4}, "must divide batch_size=6 and be a multiple of world=1, got 4"),
        ({"shard_window": 1, "shard_lanes": 2, "world": 3}, "be a multiple of world=3, got 2"),
        ({"shard_window": 1, "shard_lanes": 0}, "shard_lanes must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=said):
            Loader(part, 6, size=SIDE, **given)


def test_parquet_shards_have_a_window_too(parquet):
    part = open_source(parquet).train
    loader = Loader(part, 6, size=SIDE, shard_window=1)
    assert [len(set((positions // 6).tolist())) for _, _, positions in loader.epoch(0)] == [1] * 4


def test_a_window_for_data_without_shards_is_refused():
    with pytest.raises(ValueError, match="shard_window must be 0 for data that is not in shards, got 2"):
        Loader(open_source("digits").train, 8, size=8, shard_window=2)


def test_every_test_item_is_counted_once_by_three_processes(folder):
    part = open_source(folder).test
    loaders = [
        Loader(part, 4, size=SIDE, shuffle=False, drop_last=False, in_memory=False, workers=0, rank=r, world=3)
        for r in range(3)
    ]
    seen = torch.cat([batch[2] for loader in loaders for batch in loader.epoch(0)])
    assert sorted(seen.tolist()) == list(range(7))


def test_a_model_trains_on_shards_with_a_hold_out(folder, tmp_path):
    small = {"model": "vit_nano_patch2_8", "model_options": {"depth": 1, "embed_dim": 16}, "image_size": SIDE}
    stream = {"shard_window": 2, "in_memory": "no", "workers": 0}
    recipe = TrainRecipe(data=str(folder), epochs=1, warmup_epochs=0, batch_size=6, holdout=0.2, **small, **stream)
    result = train(recipe, tmp_path / "run")
    assert (result.steps, len(result.predictions.labels)) == (3, 7)
    assert (tmp_path / "run" / "best.safetensors").is_file()


def test_labels_may_be_text_or_stand_in_json(tmp_path):
    pets = ["cat", "dog", "cat"]
    write_tar(tmp_path / "train.tar", [{f"a/{i}.png": image(i), f"a/{i}.txt": p.encode()} for i, p in enumerate(pets)])
    write_tar(tmp_path / "test" / "x.tar", [{"b.png": image(3), "b.json": json.dumps({"label": "dog"}).encode()}])
    with pytest.warns(UserWarning, match="1 of 2 classes have no items in the test part"):
        source = open_source(tmp_path)
    assert (source.classes, source.train.labels.tolist(), source.test.labels.tolist()) == (
        ("cat", "dog"),
        [0, 1, 0],
        [1],
    )


def test_one_of_several_pictures_and_keys_is_chosen_by_name(tmp_path):
    for part in ("train", "test"):
        said = json.dumps({"label": 0, "breed": "pug"}).encode()
        write_tar(tmp_path / f"{part}.tar", [{"0.png": image(1), "0.mask.png": image(9), "0.json": said}])
    with pytest.raises(DataError, match=r"sample '0' has .*several pictures; choose one with image_column="):
        open_source(tmp_path)
    source = open_source(tmp_path, image_column="mask.png", label_column="breed")
    assert source.classes == ("pug",)
    assert int(source.train.decode(0, SIDE)[0, 0, 0]) == 9


def compress(path):
    path.rename(path.with_name("train.tar.gz"))


def cut(path):
    path.write_bytes(path.read_bytes()[:700])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (compress, r"train.tar.gz: compressed tars have no random access; unpack it to train.tar"),
        (cut, r"train.tar: .*cut short"),
        (lambda path: path.write_bytes(b"x" * 2000), r"train.tar: not an uncompressed tar"),
        (lambda path: write_tar(path, [{"0.png": image(0)}]), r"sample '0' has no label: expected a .cls"),
        (lambda path: write_tar(path, [{"0.cls": b"0"}]), r"sample '0' has cls, and no picture"),
        (lambda path: write_tar(path, []), r"train.tar: no samples"),
    ],
)
def test_shards_that_cannot_be_used_are_told_by_file_and_sample(tmp_path, spoil, message):
    for part in ("train", "test"):
        write_tar(tmp_path / f"{part}.tar", [{"0.png": image(0), "0.cls": b"0"}])
    spoil(tmp_path / "train.tar")
    with pytest.raises(DataError, match=message):
        open_source(tmp_path)


def test_the_index_of_a_large_shard_is_kept_and_made_anew_when_it_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("CUMULANT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("cumulant.data.tars.KEPT_SAMPLES", 2)
    data = write_set(tmp_path / "data", train=4, test=2)
    first = open_source(data).identity()
    assert len(list((tmp_path / "cache").glob("*.npz"))) == 2
    monkeypatch.setattr("cumulant.data.tars.read_samples", lambda *_: pytest.fail("read again"))
    assert open_source(data).identity() == first
    monkeypatch.undo()
    monkeypatch.setenv("CUMULANT_CACHE", str(tmp_path / "cache"))
    write_tar(data / "train-000000.tar", [{"x.png": image(1), "x.cls": b"0"}, {"y.png": image(1), "y.cls": b"1"}])
    assert open_source(data).identity() != first
