"""Images come out of tables and folders as they went in, square, in RGB, with the right label and class name."""

import io
import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from samples import encode, image_cells, picture, write_images, write_table

from cumulant.data import TensorImages, open_source, rows
from cumulant.data.decode import decode_image
from cumulant.data.part import DecodeError


def as_tensor(levels):
    return torch.from_numpy(levels.transpose(2, 0, 1).copy())


def one_image_table(folder, cells, column="image"):
    for part in ("train", "test"):
        write_table(folder / f"{part}.parquet", {column: cells, "label": list(range(len(cells)))})
    return open_source(folder)


def write_tree(folder, files, side=8):
    for i, file in enumerate(files):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(encode(picture(i, side, side)))


def test_parquet_pixels_and_labels_are_those_that_were_written(tmp_path):
    source = open_source(write_images(tmp_path / "set"))
    assert source.kind == "image"
    assert source.name == "set"
    assert (len(source.train), len(source.test)) == (12, 6)
    assert source.train.labels.tolist() == [i % 3 for i in range(12)]
    for i in range(12):
        assert torch.equal(source.train.decode(i, 8), as_tensor(picture(i)))
    assert torch.equal(source.test.decode(5, 8), as_tensor(picture(1005)))


def test_shards_follow_each_other_and_a_name_says_which_row(tmp_path):
    for shard in range(2):
        cells = image_cells([encode(picture(10 * shard + i)) for i in range(3)])
        write_table(tmp_path / f"train-0000{shard}-of-00002.parquet", {"image": cells, "label": [0, 1, shard]})
    write_table(tmp_path / "test.parquet", {"image": cells, "label": [0, 1, 1]})
    train = open_source(tmp_path).train
    assert train.labels.tolist() == [0, 1, 0, 0, 1, 1]
    assert torch.equal(train.decode(4, 8), as_tensor(picture(11)))
    assert train.name(4) == "train-00001-of-00002.parquet row 1"


@pytest.mark.parametrize("layout", ["data/{}-00000-of-00001.parquet", "{}/0000.parquet", "{}.parquet"])
def test_other_places_of_parquet_files_are_found(tmp_path, layout):
    for part in ("train", "validation"):
        write_table(tmp_path / layout.format(part), {"image": image_cells([encode(picture())]), "label": [0]})
    assert len(open_source(tmp_path).train) == 1


def test_class_names_come_from_the_table_else_they_are_numbers(tmp_path):
    assert open_source(write_images(tmp_path / "named", names=["cat", "dog", "owl"])).classes == ("cat", "dog", "owl")
    assert open_source(write_images(tmp_path / "plain")).classes == ("0", "1", "2")


def test_a_classes_file_gives_friendlier_names(tmp_path):
    write_images(tmp_path, names=["n01", "n02", "n03"])
    (tmp_path / "classes.tsv").write_text("label\twnid\tname\n1\tn02\tdog\n0\tn01\tcat\n2\tn03\towl\n")
    assert open_source(tmp_path).classes == ("cat", "dog", "owl")


def test_text_labels_are_numbered_in_sorted_order(tmp_path):
    cells = image_cells([encode(picture(i)) for i in range(3)])
    for part in ("train", "test"):
        write_table(tmp_path / f"{part}.parquet", {"image": cells, "label": ["owl", "cat", "owl"]})
    source = open_source(tmp_path)
    assert source.classes == ("cat", "owl")
    assert source.train.labels.tolist() == [1, 0, 1]


def test_plain_binary_columns_of_any_name_are_images(tmp_path):
    source = one_image_table(tmp_path, [encode(picture(3))], column="img")
    assert torch.equal(source.train.decode(0, 8), as_tensor(picture(3)))


def test_a_row_may_point_to_a_file_beside_the_table(tmp_path):
    write_tree(tmp_path, ["pictures/a.png"])
    source = one_image_table(tmp_path, [{"bytes": None, "path": "pictures/a.png"}])
    assert torch.equal(source.train.decode(0, 8), as_tensor(picture(0)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP"])
def test_every_usual_format_decodes(tmp_path, kind):
    smooth = np.add.outer(np.arange(16), np.arange(16))[..., None].repeat(3, -1).astype(np.uint8) * 8
    pixels = one_image_table(tmp_path, image_cells([encode(smooth, kind)])).train.decode(0, 16)
    assert pixels.shape == (3, 16, 16)
    assert (pixels.float() - as_tensor(smooth).float()).abs().mean() < 4


@pytest.mark.parametrize(("width", "height"), [(24, 8), (8, 24)])
def test_the_centre_square_of_a_long_picture_is_taken(tmp_path, width, height):
    levels = picture(0, width, height)
    square = levels[:, 8:16] if width > height else levels[8:16]
    pixels = one_image_table(tmp_path, image_cells([encode(levels)])).train.decode(0, 8)
    assert torch.equal(pixels, as_tensor(square))


def test_resizing_averages_rather_than_skips_pixels(tmp_path):
    board = (np.indices((32, 32)).sum(0) % 2 * 255).astype(np.uint8)[..., None].repeat(3, -1)
    pixels = one_image_table(tmp_path, image_cells([encode(board)])).train.decode(0, 8)
    assert (pixels[:, 1:-1, 1:-1].float() - 127.5).abs().max() < 8


@pytest.mark.parametrize(("kind", "scale"), [(np.float32, 1 / 255), (np.float32, 257), (np.int32, 257)])
def test_pixels_of_32_bits_are_levels_or_refused_not_clipped(tmp_path, kind, scale):
    levels = picture().mean(2).round()
    file = tmp_path / "x.tif"
    Image.fromarray(levels.astype(kind)).save(file)
    assert torch.equal(decode_image(file, len(levels), "x"), torch.from_numpy(levels).to(torch.uint8).expand(3, -1, -1))
    Image.fromarray((levels * scale).astype(kind)).save(file)
    with pytest.raises(DecodeError, match=r"pixels of 32 bits from .* expected 0 to 255, or a file of 8 or 16 bits"):
        decode_image(file, len(levels), "x")


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1"])
def test_other_colour_modes_become_rgb(tmp_path, mode):
    file = tmp_path / ("x.jpg" if mode == "CMYK" else "x.png")
    Image.fromarray(picture()).convert(mode).save(file)
    assert one_image_table(tmp_path, image_cells([file.read_bytes()])).train.decode(0, 8).shape == (3, 8, 8)


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path):
    levels = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    file = tmp_path / "deep.png"
    Image.fromarray(levels).save(file)
    pixels = one_image_table(tmp_path, image_cells([file.read_bytes()])).train.decode(0, 8)
    assert torch.equal(pixels[0], torch.from_numpy((levels >> 8).astype(np.uint8)))


def test_sixteen_bit_grey_of_a_portable_graymap_is_scaled_too(tmp_path):
    levels = np.array([[0, 1000], [32768, 65535]])
    content = b"P5 2 2 65535\n" + levels.astype(">u2").tobytes()
    source = one_image_table(tmp_path, [{"bytes": content, "path": None}])
    assert source.train.decode(0, 2)[0].tolist() == (levels >> 8).tolist()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_turned_photograph_is_set_upright(tmp_path, kind, orientation):
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    blocks = np.kron(picture(3, 2, 2), np.ones((16, 16, 1), np.uint8))
    content = encode(blocks, kind, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
    source = one_image_table(tmp_path, [{"bytes": content, "path": None}])
    assert torch.equal(source.train.decode(0, 32), as_tensor(np.asarray(expected)))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_damaged_note_about_a_picture_does_not_cost_the_picture(tmp_path):
    content = encode(picture(0), exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff")
    source = one_image_table(tmp_path, [{"bytes": content, "path": None}])
    assert torch.equal(source.train.decode(0, 8), as_tensor(picture(0)))


def test_paths_are_relative_to_the_table_that_holds_them(tmp_path):
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    for seed, part in enumerate(("train", "test")):
        cells = pa.array([{"bytes": None, "path": "0.png"}], kind)
        write_table(tmp_path / part / "0000.parquet", {"image": cells, "label": [0]})
        (tmp_path / part / "0.png").write_bytes(encode(picture(seed)))
    source = open_source(tmp_path)
    assert torch.equal(source.train.decode(0, 8), as_tensor(picture(0)))
    assert torch.equal(source.test.decode(0, 8), as_tensor(picture(1)))


def test_a_column_of_groups_means_nothing_for_images(tmp_path):
    for part in ("train", "test"):
        for groups in ([0, 1], ["land", "water"]):
            cells = image_cells([encode(picture(i)) for i in range(2)])
            write_table(tmp_path / f"{part}.parquet", {"image": cells, "label": [0, 1], "group": groups})
            if part == "test":
                assert len(open_source(tmp_path).test) == 2


def test_hidden_files_beside_parquet_are_left_out(tmp_path):
    for part in ("train", "test"):
        cells = image_cells([encode(picture(0))])
        write_table(tmp_path / part / "0000.parquet", {"image": cells, "label": [0]})
        (tmp_path / part / "._0000.parquet").write_bytes(b"a file manager's note")
    assert len(open_source(tmp_path).train) == 1


def test_a_part_opens_its_files_again_in_another_process(tmp_path):
    train = open_source(write_images(tmp_path, side=64)).train
    before = train.decode(3, 8)
    sent = pickle.dumps(train)
    assert len(sent) < 20_000  # the table itself stays behind
    assert torch.equal(pickle.loads(sent).decode(3, 8), before)


def test_large_tables_are_read_from_a_memory_mapped_copy_made_once(tmp_path, monkeypatch):
    write_images(tmp_path / "set")
    small = [open_source(tmp_path / "set").train.decode(i, 8) for i in range(12)]
    monkeypatch.setattr(rows, "IN_MEMORY_BYTES", 0)
    monkeypatch.setenv("CUMULANT_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        large = open_source(tmp_path / "set").train
        assert all(torch.equal(large.decode(i, 8), small[i]) for i in range(12))
        assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".arrow"]


def test_an_image_tree_is_read_in_sorted_order(tmp_path):
    write_tree(tmp_path, ["train/b/2.png", "train/b/1.PNG", "train/a/deep/x.png", "val/b/9.png", "train/a/.hidden.png"])
    (tmp_path / "train/a/notes.txt").write_text("no image")
    source = open_source(tmp_path)
    assert source.classes == ("a", "b")
    assert [source.train.name(i)[len(str(tmp_path)) + 1 :] for i in range(3)] == [
        "train/a/deep/x.png",
        "train/b/1.PNG",
        "train/b/2.png",
    ]
    assert source.train.labels.tolist() == [0, 1, 1]
    assert source.test.labels.tolist() == [1]
    assert torch.equal(source.train.decode(2, 8), as_tensor(picture(0)))


def test_tiny_imagenet_is_read_as_it_is_downloaded(tmp_path):
    write_tree(tmp_path, ["train/n01/images/a.png", "train/n02/images/b.png", "val/images/v0.png", "val/images/v1.png"])
    (tmp_path / "val/val_annotations.txt").write_text("v0.png\tn02\t0\t0\t1\t1\nv1.png\tn01\t0\t0\t1\t1\n")
    test = open_source(tmp_path).test
    assert test.labels.tolist() == [1, 0]
    assert torch.equal(test.decode(0, 8), as_tensor(picture(2)))


def test_tiny_imagenet_is_read_when_its_pictures_were_sorted_by_class_and_the_list_stayed(tmp_path):
    write_tree(tmp_path, ["train/n01/a.png", "train/n02/b.png", "val/n01/v1.png", "val/n02/v0.png"])
    (tmp_path / "val/val_annotations.txt").write_text("v0.png\tn02\t0\t0\t1\t1\nv1.png\tn01\t0\t0\t1\t1\n")
    test = open_source(tmp_path).test
    assert [test.name(i).rsplit("/", 1)[1] for i in range(2)] == ["v1.png", "v0.png"]
    assert torch.equal(test.decode(0, 8), as_tensor(picture(2)))


def test_hidden_folders_and_links_that_lead_back_add_no_images(tmp_path):
    write_tree(tmp_path, ["train/a/0.png", "train/a/.checkpoints/0.png", "train/b/in/0.png", "val/a/0.png"])
    (tmp_path / "train/a/self").symlink_to(tmp_path / "train/a")
    (tmp_path / "train/b/up").symlink_to(tmp_path / "train")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "train/b")
    (tmp_path / "elsewhere/1.png").write_bytes(encode(picture(1)))
    (tmp_path / "train/b/out").symlink_to(tmp_path / "elsewhere")
    part = open_source(tmp_path).train
    names = [str(part.name(i)).removeprefix(f"{tmp_path}/train/") for i in range(len(part))]
    assert names == ["a/0.png", "b/in/0.png", "b/out/1.png"]


def test_validation_comes_before_test_and_can_be_chosen(tmp_path):
    write_tree(tmp_path, ["train/a/0.png", "validation/a/0.png", "test/a/0.png", "test/a/1.png"])
    assert len(open_source(tmp_path).test) == 1
    assert len(open_source(tmp_path, test_part="test").test) == 2


def test_names_are_looked_up_in_the_data_folder_of_the_environment(tmp_path, monkeypatch):
    write_images(tmp_path / "cifar10")
    monkeypatch.setenv("CUMULANT_DATA", str(tmp_path))
    assert len(open_source("cifar10").train) == 12


def test_tensors_are_a_part_too_and_are_resized_like_files():
    part = TensorImages(as_tensor(picture(0, 24, 8))[None], torch.tensor([0]))
    assert torch.equal(part.decode(0, 8), as_tensor(picture(0, 24, 8)[:, 8:16]))


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64), "images must be uint8"),
        (torch.zeros(2, 2, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), "images must be uint8"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), "labels must be int64"),
    ],
)
def test_tensors_of_another_kind_are_refused(images, labels, message):
    with pytest.raises(ValueError, match=message):
        TensorImages(images, labels)
