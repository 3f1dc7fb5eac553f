import pytest
import torch
from small_models import bert, padded, vit
from torch.export import Dim

import cumulant
from cumulant.conversion import convert, export_onnx, export_program


def test_an_exported_program_runs_at_other_batch_sizes():
    model = cumulant.create_model("vit_nano_patch2_8", num_classes=10, init_std=0.2).eval()
    convert(model, layers={0: "cumulant2", 1: {"heads": [0, 1]}})
    shapes = ({0: Dim("batch", min=2, max=64)},)
    program = export_program(model, torch.randn(2, 1, 8, 8), dynamic_shapes=shapes)
    images = torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(program.module()(images), model(images), atol=1e-5, rtol=1e-4)


def onnx():
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"needs {name}: pip install onnx onnxscript onnxruntime")


def test_onnx_runtime_agrees_at_other_lengths(tmp_path):
    onnx()
    model = bert(num_hidden_layers=1)
    convert(model, "cumulant3")
    batch, length = Dim("batch", min=2, max=64), Dim("length", min=2, max=128)
    other = {"input_ids": torch.randint(0, 60, (3, 14)), "attention_mask": torch.ones(3, 14, dtype=torch.long)}
    other["attention_mask"][1, 5:] = 0
    shapes = ({0: batch, 1: length}, {0: batch, 1: length})
    error = export_onnx(model, padded(), tmp_path / "bert.onnx", dynamic_shapes=shapes, others=(other,))
    assert error < 1e-4
    session = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "bert.onnx")
    assert [x.name for x in session.get_inputs()] == ["input_ids", "attention_mask"]
    assert [x.name for x in session.get_outputs()] == ["last_hidden_state", "pooler_output"]


@pytest.mark.timm
def test_onnx_runtime_agrees_at_other_resolutions(tmp_path):
    onnx()
    model = vit(depth=1, dynamic_img_size=True)
    convert(model, "cumulant2")
    cells = Dim("cells", min=2, max=32)
    shapes = ({0: Dim("batch", min=2, max=8), 2: 8 * cells, 3: 8 * cells},)
    images, larger = torch.randn(2, 3, 48, 48), torch.randn(3, 3, 64, 64)
    error = export_onnx(model, images, tmp_path / "vit.onnx", dynamic_shapes=shapes, others=(larger,))
    assert error < 1e-4


def test_our_own_vit_is_exported_for_every_resolution(tmp_path):
    """Positions are resized in the graph: larger, smaller, not square, and the size that the table was made for."""
    onnx()
    torch.manual_seed(0)
    model = cumulant.create_model("vit_nano_patch4_32", num_classes=10, depth=1, init_std=0.2).eval()
    convert(model, "cumulant3")
    rows, columns = Dim("rows", min=2, max=64), Dim("columns", min=2, max=64)
    shapes = ({0: Dim("batch", min=2, max=8), 2: 4 * rows, 3: 4 * columns},)
    others = tuple(torch.randn(3, 3, *size) for size in ((32, 32), (64, 80), (24, 28), (32, 64)))
    images = torch.randn(2, 3, 32, 32)  # of that size itself, so that nothing need be resized while tracing
    error = export_onnx(model, images, tmp_path / "vit.onnx", dynamic_shapes=shapes, others=others)
    assert error < 1e-4
    program = export_program(model, images, dynamic_shapes=shapes).module()
    for other in others:
        torch.testing.assert_close(program(other), model(other), atol=1e-4, rtol=1e-4)


def test_an_answer_of_nan_is_no_agreement(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.bias, torch.nan)
    with pytest.raises(RuntimeError, match="differs from torch by nan"):
        export_onnx(model, torch.randn(1, 2), tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()
    (tmp_path / "model.onnx").write_text("of yesterday")
    with pytest.raises(RuntimeError, match="differs from torch by nan"):
        export_onnx(model, torch.randn(1, 2), tmp_path / "model.onnx")
    assert [(x.name, x.read_text()) for x in tmp_path.iterdir()] == [("model.onnx", "of yesterday")]


class _Answers(torch.nn.Module):
    """Numbers, flags and places, one of them under the name of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        logits = self.linear(x)
        return {"logits": logits, "sure": logits > 0, "best": logits.argmax(-1), "x": 2 * x}


def test_flags_places_and_what_is_called_like_an_input_are_exported_too(tmp_path):
    onnx()
    assert export_onnx(_Answers(), torch.randn(2, 3), tmp_path / "model.onnx") < 1e-4
    session = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "model.onnx")
    assert [x.name for x in session.get_inputs()] == ["x"]
    assert [x.name for x in session.get_outputs()] == ["logits", "sure", "best", "x_out"]
