"""Names of the Hub go through the package `datasets`; a stand-in with its table interface takes its place here."""

import sys
import types

import pyarrow as pa
import pytest
import torch
from samples import encode, frame_numbers, image_cells, numbered_frames, picture

from cumulant.data import ALIASES, open_source


class Table:
    """The part of datasets.Dataset that is used: columns, Arrow rows."""

    def __init__(self, table):
        self.table = table
        self.features = types.SimpleNamespace(arrow_schema=table.schema)

    def __len__(self):
        return len(self.table)

    def select_columns(self, names):
        return Table(self.table.select(names))

    def with_format(self, kind):
        assert kind == "arrow"
        return self

    def __getitem__(self, key):
        return self.table.slice(key, 1) if isinstance(key, int) else self.table


@pytest.fixture
def hub(monkeypatch):
    """What the Hub holds: repository -> part -> columns."""
    shelves = {}

    def load_dataset(name):
        return {part: Table(pa.table(columns)) for part, columns in shelves[name].items()}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return shelves


def images(count, first=0):
    return image_cells([encode(picture(first + i)) for i in range(count)])


def test_the_promised_aliases_exist():
    assert {"tiny-imagenet", "imagenet-100", "cifar10", "cifar100", "ucf101"} <= set(ALIASES)


def test_cifar100_is_read_with_its_own_column_names(hub):
    columns = {"img": images(4), "fine_label": [0, 1, 2, 1], "coarse_label": [0, 0, 1, 0]}
    hub["uoft-cs/cifar100"] = {"train": columns, "test": columns}
    source = open_source("cifar100")
    assert source.train.labels.tolist() == [0, 1, 2, 1]
    assert torch.equal(source.test.decode(3, 8), torch.from_numpy(picture(3).transpose(2, 0, 1).copy()))
    assert source.test.name(3) == "uoft-cs/cifar100 test row 3"


def test_tiny_imagenet_100_keeps_every_second_class(hub):
    columns = {"image": images(6), "label": [0, 1, 2, 3, 2, 0]}
    hub["zh-plus/tiny-imagenet"] = {"train": columns, "valid": columns}
    whole, half = open_source("tiny-imagenet"), open_source("tiny-imagenet-100")
    assert whole.classes == ("0", "1", "2", "3")
    assert half.classes == ("0", "2")
    assert half.train.labels.tolist() == [0, 1, 1, 0]
    assert torch.equal(half.train.decode(1, 8), whole.train.decode(2, 8))


@pytest.mark.parametrize("error", [ConnectionError("no route to the Hub"), ValueError("gated: ask for access")])
def test_a_hub_that_gives_nothing_is_answered_with_what_to_do(monkeypatch, error):
    def load_dataset(name):
        raise error

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(
        OSError, match=r"not give uoft-cs/cifar10 \(.*(no route|gated).*\); .*its folder.*CUMULANT_DATA"
    ):
        open_source("cifar10")


def frame_table(clips):
    """One row a frame, in the wrong order."""
    rows = [
        (frame, clip, number, label)
        for clip, (count, label) in clips.items()
        for number, frame in enumerate(numbered_frames(count))
    ][::-1]
    cells = image_cells([encode(frame) for frame, *_ in rows])
    names = ("clip_id", "frame", "label")
    return {"image": cells, **{name: [row[i + 1] for row in rows] for i, name in enumerate(names)}}


def test_frames_in_rows_of_their_own_are_put_together_as_clips(hub):
    hub["flwrlabs/ucf101"] = {
        "train": frame_table({"v_Run_g08_c01": (5, 0), "v_Sit_g09_c01": (3, 1)}),
        "test": frame_table({"v_Run_g01_c01": (4, 0), "v_Sit_g02_c01": (2, 1)}),
    }
    source = open_source("ucf101", frames=2, stride=1)
    assert source.kind == "video"
    assert (len(source.train), len(source.test)) == (2, 2)
    assert [len(source.train.whole(i, 8)) for i in range(2)] == [5, 3]
    assert frame_numbers(source.train.whole(0, 8).transpose(0, 1)) == [0, 1, 2, 3, 4]
    assert frame_numbers(source.test.decode(0, 8)) == [1, 2]
    assert "v_Sit_g09_c01" in source.train.name(1)


def test_another_split_regroups_the_clips_of_the_hub(hub):
    clips = {f"v_Run_g{group:02d}_c01": (2, 0) for group in (1, 8, 15)}
    train, test = ({name: clips[name] for name in list(clips)[a:b]} for a, b in ((1, 3), (0, 1)))
    hub["flwrlabs/ucf101"] = {"train": frame_table(train), "test": frame_table(test)}
    source = open_source("ucf101", frames=1, stride=1, split=3)
    assert [source.test.name(i)[:9] for i in range(len(source.test))] == ["v_Run_g15"]
    assert len(source.train) == 2
