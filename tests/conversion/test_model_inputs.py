"""What a model takes is found out, or asked for in words; what is compared is something that the layers reach."""

import numpy as np
import pytest
import torch
from small_models import IMAGE, TEXT, bert, transformers, vision, vit
from torch import nn

import cumulant
from cumulant.conversion import convert, diagnose, restore
from cumulant.conversion.command import Convert, Diagnose, run_convert, run_diagnose
from cumulant.inspect.batches import answers, relative_error
from cumulant.inspect.examples import example_for
from tools.tiny_models import tiny_model

KINDS = ["ASTModel", "Wav2Vec2Model", "DetrModel", "LayoutLMv3Model", "DecisionTransformerModel"]
PATCHES = ["Siglip2VisionModel", "VideoLlama3VisionModel", "MuseSparkVisionModel", "PerceiverModel"]


@pytest.mark.parametrize("name", KINDS + PATCHES)
def test_inputs_are_found_for_sound_pictures_patches_boxes_and_actions(name):
    model = tiny_model(getattr(transformers(), name))
    batch = example_for(model)
    with torch.no_grad():
        model(**batch)


def test_a_model_of_pictures_and_texts_is_given_both():
    """As many image words as there are vectors of the picture: layers of both towers run and are replaced."""
    model = tiny_model(transformers().LlavaModel)
    report = convert(model, force=True)
    assert {name.split(".")[0] for name in report.replaced} == {"vision_tower", "language_model"}


@pytest.mark.parametrize("name", ["MusicgenModel", "MusicgenMelodyModel"])
def test_words_of_several_code_books_have_one_mask(name):
    model = tiny_model(getattr(transformers(), name))
    assert example_for(model)["attention_mask"].ndim == 2
    assert convert(model, force=True).replaced


@pytest.mark.parametrize("name", ["RTDetrModel", "Mask2FormerModel"])
def test_detectors_are_converted_on_a_small_backbone_with_all_of_its_maps(name):
    assert convert(tiny_model(getattr(transformers(), name)), force=True).replaced


class Odd(nn.Module):
    """A model that does not tell what it takes."""

    def __init__(self):
        super().__init__()
        self.encoder = bert()

    def forward(self, secret):
        return self.encoder(input_ids=secret.words).last_hidden_state


def test_what_cannot_be_found_out_is_asked_for():
    with pytest.raises(ValueError, match=r"cannot tell what Odd takes.*pass example="):
        convert(Odd(), force=True)


@pytest.mark.parametrize("ask", [convert, diagnose])
def test_no_example_is_asked_for_where_there_is_no_attention(ask):
    for model in (nn.Linear(4, 4), nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())):
        with pytest.raises(ValueError, match=f"{type(model).__name__} has no attention that can be converted"):
            ask(model)


def test_an_example_that_the_model_does_not_take_is_named():
    with pytest.raises(ValueError, match=r"BertModel does not take the batch a tensor of shape \(2, 3, 8, 8\)"):
        convert(bert(), example=torch.randn(2, 3, 8, 8))


def test_labels_of_a_loader_are_left_out():
    model = cumulant.create_model("vit_nano_patch2_8", num_classes=10, init_std=0.2).eval()
    images, labels = torch.randn(4, 1, 8, 8), torch.arange(4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=2)
    one = convert(model, data=loader, force=True).measured_error
    restore(model)
    assert one == convert(model, data=[images[:2], images[2:]], force=True).measured_error
    restore(model)
    assert convert(model, example=(images, labels), force=True).replaced


@pytest.mark.timm
def test_labels_are_not_taken_for_the_mask_of_a_timm_model():
    model, images = vit(), torch.randn(2, 3, 32, 32)
    one = convert(model, data=[(images, torch.tensor([1, 2]))], force=True).measured_error
    restore(model)
    assert one == convert(model, data=[images], force=True).measured_error


@pytest.mark.timm
def test_a_hybrid_of_timm_is_given_pictures_and_not_the_channels_of_its_backbone():
    import timm

    model = timm.create_model("vit_tiny_r_s16_p8_224", img_size=64, num_classes=3).eval()
    assert example_for(model).shape == (2, 3, 64, 64)


def test_a_model_that_draws_at_random_draws_the_same_again():
    t = transformers()
    sizes = {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4}
    model = t.ViTMAEModel(t.ViTMAEConfig(**IMAGE, **sizes, decoder_intermediate_size=64)).eval()
    batch = [{"pixel_values": torch.randn(2, 3, 32, 32)}]
    assert relative_error(answers(model, batch), answers(model, batch)) == 0
    assert len(convert(model, force=True).replaced) == 2


def test_a_model_without_attention_is_told_so():
    t = transformers()
    model = t.ConvNextModel(t.ConvNextConfig(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], image_size=64)).eval()
    with pytest.raises(ValueError, match="ConvNextModel has no attention layer"):
        convert(model)


class Two(nn.Module):
    """Says first what attention does not reach, as MaskFormer does."""

    def __init__(self, seen: bool = True):
        super().__init__()
        self.encoder, self.seen = bert(), seen

    def forward(self, input_ids):
        before = self.encoder.embeddings(input_ids)
        after = self.encoder(input_ids=input_ids).last_hidden_state
        return {"features": before, "decoded": after if self.seen else before}


def test_what_is_compared_is_reached_by_the_layers():
    ids = {"input_ids": torch.arange(3, 15)[None]}
    report = convert(Two().eval(), example=ids, force=True)
    assert report.compared == "decoded"
    assert report.measured_error > 0
    assert "relative change of decoded" in str(report)
    assert min(diagnose(Two().eval(), ids).layers[0].effect.values()) > 0


def test_where_no_output_is_reached_nothing_is_claimed():
    ids = {"input_ids": torch.arange(3, 15)[None]}
    report = convert(Two(seen=False).eval(), example=ids, force=True)
    assert report.compared is None
    assert "0.00%" not in str(report)
    assert "reaches no output" in str(report)
    with pytest.raises(ValueError, match="reaches none of its outputs"):
        diagnose(Two(seen=False).eval(), ids)


def test_layers_that_did_not_run_are_told_from_those_that_never_ask():
    t = transformers()
    parts = {"text_config": {**TEXT, "vocab_size": 60}, "vision_config": IMAGE, "projection_dim": 16}
    model = t.CLIPModel(t.CLIPConfig(**parts)).eval()
    report = convert(model.text_model, force=True)
    assert not report.kept
    blip = tiny_model(t.LlavaModel)
    report = convert(blip, example={"input_ids": torch.arange(5, 12)[None]}, force=True)
    assert all("does not run for this example" in why for why in report.kept.values())
    assert report.kept


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".png"])
def test_the_commands_take_an_example_from_a_file(suffix, tmp_path):
    vision("ViT").save_pretrained(tmp_path / "model")
    file = tmp_path / f"one{suffix}"
    pixels = np.random.default_rng(0).normal(size=(2, 3, 32, 32)).astype("float32")
    if suffix == ".npz":
        np.savez(file, pixel_values=pixels)
    elif suffix == ".npy":
        np.save(file, pixels)
    else:
        from PIL import Image

        Image.fromarray(np.zeros((40, 50, 3), dtype="uint8")).save(file)
    model, out = str(tmp_path / "model"), tmp_path / "out"
    assert run_convert(Convert(model, example=file, out=out, device="cpu", force=True)).measured_on == "data"
    if suffix == ".npz":
        assert run_diagnose(Diagnose(model, example=file, out=out, device="cpu")).measured_on == "data"


def test_an_example_with_code_inside_is_not_run(tmp_path):
    vision("ViT").save_pretrained(tmp_path / "model")
    np.savez(tmp_path / "bad.npz", pixel_values=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match=r"bad\.npz cannot be read as arrays of numbers"):
        run_convert(Convert(str(tmp_path / "model"), example=tmp_path / "bad.npz", out=tmp_path, device="cpu"))
    with pytest.raises(FileNotFoundError, match="no example"):
        run_convert(Convert(str(tmp_path / "model"), example=tmp_path / "none.npz", out=tmp_path, device="cpu"))
