"""Tiny data sets for the tests: pictures through Pillow, clips through PyAV, tables through pyarrow."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def picture(seed=0, width=8, height=8):
    """Random RGB levels (height, width, 3)."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encode(levels, kind="PNG", **options):
    """An image file as bytes."""
    file = io.BytesIO()
    Image.fromarray(levels).save(file, kind, **options)
    return file.getvalue()


def write_table(file, columns, names=None, types=None):
    """A parquet file; `names` are class names in Hugging Face's description of the column 'label'."""
    table = pa.table(columns)
    features = {column: {"_type": kind} for column, kind in (types or {}).items()}
    if names is not None:
        features["label"] = {"names": names, "_type": "ClassLabel"}
    if features:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file, row_group_size=3)


def image_cells(images):
    return [{"bytes": image, "path": f"{i}.png"} for i, image in enumerate(images)]


def write_images(folder, train=12, test=6, classes=3, names=None, side=8, spoil=()):
    """train-*.parquet and test-*.parquet of random pictures; the train rows in `spoil` hold no image."""
    for part, count, shift in (("train", train, 0), ("test", test, 1000)):
        images = [encode(picture(shift + i, side, side)) for i in range(count)]
        if part == "train":
            images = [b"not an image" if i in spoil else image for i, image in enumerate(images)]
        columns = {"image": image_cells(images), "label": [i % classes for i in range(count)]}
        write_table(folder / f"{part}-00000-of-00001.parquet", columns, names)
    return folder


def numbered_frames(count, width=16, height=16):
    """Frames of one grey level each, 7 times their number: a clip tells which frames it holds."""
    return [np.full((height, width, 3), 7 * number, dtype=np.uint8) for number in range(count)]


def frame_numbers(clip):
    """The numbers of the frames of a clip (3, T, size, size) made of `numbered_frames`."""
    return [round(level / 7) for level in clip.float().mean((0, 2, 3)).tolist()]


def write_clip(file, frames, codec="mpeg4"):
    """Encode frames (height, width, 3) as a video file."""
    import av

    file.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(file), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 2_000_000
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def write_frame_table(file, clips, labels, **columns):
    """Video parquet: one row a clip, `frames` = list of encoded images."""
    cells = [image_cells([encode(frame) for frame in clip]) for clip in clips]
    kind = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    write_table(file, {"frames": pa.array(cells, kind), "label": labels, **columns})
