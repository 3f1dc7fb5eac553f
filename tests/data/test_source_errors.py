"""A data set that cannot be used says which file, what was found and what was expected, before anything is decoded."""

import re
import sys
import warnings

import pytest
from samples import (
    encode,
    image_cells,
    numbered_frames,
    picture,
    write_clip,
    write_frame_table,
    write_images,
    write_table,
)

from cumulant.data import DataError, open_source
from cumulant.optional import install


def table(folder, part, labels, **columns):
    cells = image_cells([encode(picture(i)) for i in range(len(labels))])
    write_table(folder / f"{part}.parquet", {"image": cells, "label": labels, **columns})


def tree(folder, *files):
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(encode(picture()))


def refused(data, *words, error=DataError, **options):
    with pytest.raises(error) as raised:
        open_source(data, **options)
    for word in words:
        assert word in str(raised.value)


def test_a_missing_folder_shows_where_it_was_looked_for_and_what_is_accepted(tmp_path):
    refused(tmp_path / "nowhere", str(tmp_path / "nowhere"), "digits", "tiny-imagenet", error=FileNotFoundError)
    refused("misspelt", "'misspelt'", "cifar10", error=FileNotFoundError)


def test_a_file_in_place_of_a_folder(tmp_path):
    table(tmp_path, "train", [0])
    refused(tmp_path / "train.parquet", "train.parquet: a file; expected the folder")


def test_a_folder_without_a_train_part_shows_what_it_holds(tmp_path):
    tree(tmp_path, "cats/1.png", "dogs/1.png")
    refused(tmp_path, "no train part", "train/<class>/", "cats, dogs")


@pytest.mark.parametrize("option", ["image_column", "label_column"])
def test_columns_are_not_asked_for_in_a_tree_in_vain(tmp_path, option):
    tree(tmp_path, "train/cat/1.png", "val/cat/1.png")
    refused(tmp_path, f"{option}='x' is for parquet tables", **{option: "x"})


def test_a_tree_or_table_with_only_a_test_part(tmp_path):
    tree(tmp_path / "tree", "test/cat/1.png")
    refused(tmp_path / "tree", "no train part among ['test']")
    table(tmp_path / "table", "test", [0])
    refused(tmp_path / "table", "no train part among ['test']")


def test_no_test_part(tmp_path):
    tree(tmp_path, "train/cat/1.png")
    refused(tmp_path, "no test part among ['train']", "validation")


def test_a_test_part_that_does_not_exist(tmp_path):
    tree(tmp_path, "train/cat/1.png", "val/cat/1.png")
    refused(tmp_path, "expected one of test", test_part="test")


def test_a_train_part_without_class_folders(tmp_path):
    tree(tmp_path, "train/1.png", "val/cat/1.png")
    refused(tmp_path, "no class folders", "train/<class>/<file>")


def test_an_unknown_class_in_the_test_part_is_named(tmp_path):
    tree(tmp_path / "tree", "train/cat/1.png", "val/dog/1.png")
    refused(tmp_path / "tree", "unknown class in the test part", "dog")
    table(tmp_path / "numbers", "train", [0, 1])
    table(tmp_path / "numbers", "test", [0, 7])
    refused(tmp_path / "numbers", "unknown class in the test part", "7")
    table(tmp_path / "text", "train", ["cat", "cat"])
    table(tmp_path / "text", "test", ["cat", "dog"])
    refused(tmp_path / "text", "unknown class in the test part", "dog")


def test_an_empty_class_is_named(tmp_path):
    tree(tmp_path / "tree", "train/cat/1.png", "val/cat/1.png")
    (tmp_path / "tree/train/dog").mkdir()
    refused(tmp_path / "tree", "empty class", "dog")
    write_images(tmp_path / "table", names=["cat", "dog", "owl", "fox"])
    refused(tmp_path / "table", "empty class", "fox")
    table(tmp_path / "gap", "train", [0, 2])
    table(tmp_path / "gap", "test", [0])
    refused(tmp_path / "gap", "empty class", "1")


def test_more_labels_than_class_names(tmp_path):
    write_images(tmp_path, names=["cat", "dog"])
    refused(tmp_path, "train label 2", "only 2 classes are named")


def test_an_empty_part(tmp_path):
    write_images(tmp_path, test=0)
    refused(tmp_path, "the test part is empty")


def test_an_unlabelled_part(tmp_path):
    table(tmp_path / "minus", "train", [0])
    table(tmp_path / "minus", "test", [-1])
    refused(tmp_path / "minus", "the test part has label -1", "test_part=")
    table(tmp_path / "null", "train", [0, 0])
    table(tmp_path / "null", "test", [0, None])
    refused(tmp_path / "null", "the test part has label -1")


def test_wrong_columns_are_listed(tmp_path):
    write_table(tmp_path / "blind/train.parquet", {"text": ["a"], "label": [0]})
    write_table(tmp_path / "blind/test.parquet", {"text": ["a"], "label": [0]})
    refused(tmp_path / "blind", "wrong columns", "no image column in ['text', 'label']")
    for part in ("train", "test"):
        write_table(tmp_path / f"nameless/{part}.parquet", {"image": image_cells([encode(picture())]), "y": [0]})
    refused(tmp_path / "nameless", "wrong columns", "no label column in ['image', 'y']", "label or labels")
    assert open_source(tmp_path / "nameless", label_column="y").classes == ("0",)


def test_a_test_part_with_other_columns(tmp_path):
    table(tmp_path, "train", [0])
    write_table(tmp_path / "test.parquet", {"picture": [b"x"], "label": [0]})
    refused(tmp_path, "wrong columns, image missing")


def test_shards_with_different_columns(tmp_path):
    table(tmp_path, "train-0", [0])
    table(tmp_path, "train-1", [0], extra=[1])
    table(tmp_path, "test", [0])
    refused(tmp_path, "train-1.parquet: wrong columns", "extra")


def test_two_image_columns_ask_for_a_choice(tmp_path):
    for part in ("train", "test"):
        table(tmp_path, part, [0], mask=[b"x"])
    refused(tmp_path, "several image columns ['image', 'mask']", "image_column=")
    refused(tmp_path, "image_column='label' holds no images", image_column="label")
    assert len(open_source(tmp_path, image_column="image").train) == 1


def test_labels_that_are_neither_numbers_nor_text(tmp_path):
    for part in ("train", "test"):
        table(tmp_path, part, [0.5])
    refused(tmp_path, "labels must be integers or text, got float")


def test_a_truncated_parquet_file_is_named(tmp_path):
    write_images(tmp_path)
    file = tmp_path / "train-00000-of-00001.parquet"
    file.write_bytes(file.read_bytes()[:-100])
    refused(tmp_path, str(file), "cut short")


def test_a_parquet_file_with_a_damaged_middle_is_named(tmp_path):
    write_images(tmp_path)
    file = tmp_path / "train-00000-of-00001.parquet"
    content = bytearray(file.read_bytes())
    data = len(content) - 8 - int.from_bytes(content[-8:-4], "little")  # the footer stays whole
    content[4:data] = bytes(data - 4)
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"train-00000-of-00001.parquet: column .* cannot be read"):
        open_source(tmp_path).train.decode(0, 8)


def test_a_missing_shard_is_said(tmp_path):
    table(tmp_path, "train-00000-of-00002", [0])
    table(tmp_path, "test", [0])
    with pytest.warns(UserWarning, match="1 of 2 shards like train-00000-of-00002.parquet"):
        open_source(tmp_path)


def test_a_classes_file_of_another_form(tmp_path):
    write_images(tmp_path)
    (tmp_path / "classes.tsv").write_text("cat\ndog\nowl\n")
    refused(tmp_path, "classes.tsv", "label and name")


def test_images_and_videos_in_one_tree(tmp_path):
    tree(tmp_path, "train/cat/1.png", "val/cat/1.png", "val/cat/1.avi")
    refused(tmp_path, "images and videos in one tree")


@pytest.mark.parametrize("split", [0, 4])
def test_a_split_that_does_not_exist(tmp_path, split):
    write_frame_table(tmp_path / "train.parquet", [numbered_frames(1)], [0], group=[1])
    write_frame_table(tmp_path / "test.parquet", [numbered_frames(1)], [0], group=[8])
    refused(tmp_path, f"split must be one of 1, 2, 3, got {split}", error=ValueError, split=split)


def test_a_second_split_without_groups(tmp_path):
    write_images(tmp_path / "table")
    refused(tmp_path / "table", "split 2 needs a column 'group'", split=2)
    tree(tmp_path / "tree", "train/cat/1.png", "val/cat/1.png")
    refused(tmp_path / "tree", "split 2 needs", split=2)


def test_mixed_groups_are_named(tmp_path):
    write_frame_table(tmp_path / "table/train.parquet", [numbered_frames(1)] * 2, [0, 1], group=[3, 8])
    write_frame_table(tmp_path / "table/test.parquet", [numbered_frames(1)] * 2, [0, 1], group=[1, 8])
    refused(tmp_path / "table", "mixed groups", "class 1 g08")
    for clip in ("train/Run/v_Run_g01_c01.avi", "test/Run/v_Run_g01_c02.avi"):
        write_clip(tmp_path / "tree" / clip, numbered_frames(2))
    refused(tmp_path / "tree", "mixed groups", "class 0 g01")


@pytest.mark.parametrize("name", ["frames", "stride", "views", "crops"])
def test_clip_settings_must_be_positive(name):
    refused("digits", f"{name} must be at least 1, got 0", error=ValueError, **{name: 0})


def test_a_hub_name_without_the_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused("owner/name", "'owner/name' is not a folder here", install("data"), error=ImportError)


@pytest.mark.parametrize(("module", "words"), [("PIL", "Pillow"), ("pyarrow.parquet", "pyarrow")])
def test_a_missing_package_names_the_extra(tmp_path, monkeypatch, module, words):
    write_images(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"{words}: {re.escape(install('data'))}"):
        open_source(tmp_path).train.decode(0, 8)


def test_classes_called_differently_in_the_two_parts_are_refused(tmp_path):
    for part, names in (("train", ["cat", "dog"]), ("test", ["dog", "cat"])):
        cells = image_cells([encode(picture(i)) for i in range(2)])
        write_table(tmp_path / f"{part}.parquet", {"image": cells, "label": [0, 1]}, names)
    refused(tmp_path, "test part are called dog, cat", "train part cat, dog", "same order")


@pytest.mark.parametrize(
    ("label", "names", "words"),
    [(10**7, None, "empty class, no training items: 1 (the largest label is 10000000"),
     (3 * 10**14, ["a", "b"], "train label 300000000000000, but only 2 classes")],
    ids=["numbers", "names"],
)  # fmt: skip
def test_a_label_beyond_all_bounds_is_refused_without_room_for_it(tmp_path, label, names, words):
    for part in ("train", "test"):
        cells = image_cells([encode(picture(i)) for i in range(2)])
        write_table(tmp_path / f"{part}.parquet", {"image": cells, "label": [0, label]}, names)
    refused(tmp_path, words)


def frame_rows(folder, part, ids, labels, frames=None):
    frames = list(range(len(ids))) if frames is None else frames
    table(folder, part, labels, clip_id=ids, frame=frames)


def test_a_clip_whose_frames_are_in_both_parts_is_refused(tmp_path):
    frame_rows(tmp_path, "train", ["a", "a", "b"], [0, 0, 1])
    frame_rows(tmp_path, "test", ["a", "c", "d"], [0, 0, 1])
    refused(tmp_path, "rows in train and in test: a")


def test_a_clip_of_two_classes_is_refused(tmp_path):
    frame_rows(tmp_path, "train", ["a", "a", "b"], [0, 1, 1])
    frame_rows(tmp_path, "test", ["c", "d"], [0, 1])
    refused(tmp_path, "rows of several classes: a")


def test_frames_without_a_number_or_a_clip_are_refused(tmp_path):
    frame_rows(tmp_path, "test", ["c", "d"], [0, 1])
    frame_rows(tmp_path, "train", ["a", "b"], [0, 1], [0, None])
    refused(tmp_path, "'frame' must hold whole numbers")
    frame_rows(tmp_path, "train", ["a", None], [0, 1])
    refused(tmp_path, "train.parquet row 1 has no clip_id")


@pytest.mark.parametrize("groups", [["x", "y"], [1, None]], ids=["text", "null"])
def test_groups_of_videos_must_be_numbers(tmp_path, groups):
    for part in ("train", "test"):
        write_frame_table(tmp_path / f"{part}.parquet", [numbered_frames(1)] * 2, [0, 1], group=groups)
    refused(tmp_path, "'group' must hold whole numbers")


def test_a_choice_without_effect_is_refused(tmp_path):
    refused("digits", "digits", "test_part has no effect there, got 'validation'", test_part="validation")
    (tmp_path / "trainlist01.txt").write_text("Run/a.avi 1\n")
    refused(tmp_path, "UCF-101's lists", "test_part has no effect there", test_part="validation")


def test_an_annotation_without_a_class_is_shown(tmp_path):
    tree(tmp_path, "train/a/0.png", "val/images/v0.png", "val/images/v1.png")
    (tmp_path / "val/val_annotations.txt").write_text("v0.png\ta\nv1.png a\n")
    refused(tmp_path, "val_annotations.txt", "'v1.png a'", "tab")


def test_a_class_without_test_items_is_named(tmp_path):
    tree(tmp_path, "train/a/1.png", "train/b/1.png", "train/c/1.png", "val/b/1.png")
    with pytest.warns(UserWarning, match=r"2 of 3 classes have no items in the test part.*: a, c$"):
        open_source(tmp_path)


def test_the_part_that_is_tested_on_is_named_where_there_are_several(tmp_path):
    tree(tmp_path, "train/a/1.png", "val/a/1.png", "val/a/2.png", "test/a/1.png")
    with pytest.warns(UserWarning, match="has the parts val, test: val is what is tested on; choose with test_part="):
        assert len(open_source(tmp_path).test) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(open_source(tmp_path, test_part="test").test) == 1
