"""Our names in the registries of other libraries: timm's attn_layer, diffusers' backends, kernel repositories."""

import shutil

import pytest
import torch

import cumulant
from cumulant.conversion import write_kernel_repository


@pytest.mark.timm
def test_timm_makes_a_vision_transformer_by_our_name():
    timm = pytest.importorskip("timm")
    small = {"embed_dim": 32, "depth": 1, "num_heads": 2, "img_size": 32, "num_classes": 3}
    named = timm.create_model("vit_tiny_patch16_224", attn_layer="cumulant3", **small).eval()
    plain = timm.create_model("vit_tiny_patch16_224", **small).eval()
    plain.load_state_dict(named.state_dict())  # the same names
    image = torch.randn(2, 3, 32, 32)
    assert not torch.allclose(named(image), plain(image))
    cumulant.convert(plain, "cumulant3", data=image, force=True)
    torch.testing.assert_close(named(image), plain(image))


@pytest.mark.timm
@pytest.mark.parametrize("mask", [None, "padding", "bias", "causal"])
def test_diffusers_has_our_names_as_backends(mask):
    home = pytest.importorskip("diffusers.models.attention_dispatch")
    q, k, v = (torch.randn(2, 10, 3, 8) for _ in range(3))  # batch, tokens, heads, width
    present = torch.rand(2, 10) > 0.3
    given = {
        None: None,
        "padding": present,
        "bias": torch.zeros(2, 1, 1, 10).masked_fill(~present[:, None, None], float("-inf")),
        "causal": torch.ones(10, 10, dtype=torch.bool).tril()[None, None].expand(2, 1, 10, 10),
    }[mask]
    found = home.dispatch_attention_fn(q, k, v, attn_mask=given, backend="cumulant3")
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    asked = {"is_causal": mask == "causal", "key_mask": present if mask in ("padding", "bias") else None}
    torch.testing.assert_close(found.transpose(1, 2), cumulant.attention(*heads, **asked))


@pytest.mark.timm
def test_a_model_of_diffusers_takes_our_name_and_gives_it_back():
    diffusers = pytest.importorskip("diffusers")
    sizes = {"attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 8, "axes_dims_rope": [2, 2, 4]}
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, pooled_projection_dim=8, **sizes
    ).eval()
    given = {
        "hidden_states": torch.randn(1, 9, 4), "encoder_hidden_states": torch.randn(1, 5, 8),
        "pooled_projections": torch.randn(1, 8), "timestep": torch.ones(1),
        "img_ids": torch.rand(9, 3), "txt_ids": torch.rand(5, 3),
    }  # fmt: skip
    before = model(**given).sample
    model.set_attention_backend("cumulant2")
    assert not torch.allclose(model(**given).sample, before)
    model.set_attention_backend("native")
    torch.testing.assert_close(model(**given).sample, before)


def test_a_kernel_repository_is_written_where_nothing_else_is(tmp_path):
    folder = write_kernel_repository(tmp_path / "kernels")
    assert write_kernel_repository(folder) == folder
    code = (folder / "build" / "torch-cpu" / "__init__.py").read_text()
    there: dict[str, object] = {}
    exec(code, there)
    assert callable(there["cumulant3"])
    (tmp_path / "mine").write_text("")
    with pytest.raises(FileExistsError, match="holds other things"):
        write_kernel_repository(tmp_path)


def test_transformers_takes_a_function_of_a_kernel_repository(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    if not transformers.utils.is_kernels_available():
        pytest.skip("the package `kernels` is not in this environment")
    monkeypatch.setenv("LOCAL_KERNELS", f"me/attention={write_kernel_repository(tmp_path / 'kernels')}")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ids, mask = torch.arange(3, 21).view(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    for kind in ("Bert", "Llama"):
        config = getattr(transformers, f"{kind}Config")(vocab_size=30, **sizes)
        model = getattr(transformers, f"{kind}Model")(config).eval()
        found = []
        for name, free in (("cumulant3", {}), ("me/attention:cumulant3", {"allow_all_kernels": True})):
            model.set_attn_implementation(name, **free)
            found.append(model(ids, attention_mask=mask).last_hidden_state[mask.bool()])
        torch.testing.assert_close(*found)


def small_encoder(folder):
    """A BERT of two layers with a tokenizer of a few words, saved as transformers does."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "long", "short", "text", "about", "attention"]
    (folder / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(0)
    made = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    BertModel(made).eval().save_pretrained(folder)
    BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)


def test_sentence_transformers_opens_a_converted_encoder_and_takes_the_name(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    from transformers import BertModel

    from cumulant.conversion import convert, save

    plain = tmp_path / "plain"
    plain.mkdir()
    small_encoder(plain)
    texts = ["a long text about attention", "short"]
    softmax = library.SentenceTransformer(str(plain)).encode(texts)
    named = library.SentenceTransformer(str(plain), model_kwargs={"attn_implementation": "cumulant3"}).encode(texts)
    assert abs(named - softmax).max() > 1e-7
    model = BertModel.from_pretrained(plain).eval()
    convert(model, "cumulant3", force=True)
    shutil.copytree(plain, tmp_path / "converted")
    save(model, tmp_path / "converted")
    opened = library.SentenceTransformer(str(tmp_path / "converted")).encode(texts)
    torch.testing.assert_close(torch.tensor(opened), torch.tensor(named), atol=1e-6, rtol=1e-5)
    whole = library.SentenceTransformer(str(plain))
    batch = {"input_ids": torch.arange(5, 11)[None], "attention_mask": torch.ones(1, 6, dtype=torch.long)}
    convert(whole, "cumulant3", layers=[1], example=(batch,), force=True)
    hybrid = whole.encode(texts)
    save(whole, tmp_path / "whole")
    whole.save(str(tmp_path / "own"))
    for folder in ("whole", "own"):
        opened = library.SentenceTransformer(str(tmp_path / folder)).encode(texts)
        torch.testing.assert_close(torch.tensor(opened), torch.tensor(hybrid), atol=1e-6, rtol=1e-5)


def test_adapters_of_peft_train_in_a_converted_model_and_are_saved(tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import BertConfig, BertModel

    from cumulant.conversion import convert, load, save

    torch.manual_seed(0)
    made = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    adapted = peft.get_peft_model(BertModel(made), peft.LoraConfig(target_modules=["query", "value"], r=2))
    ids = torch.randint(0, 50, (2, 12))
    convert(adapted, "cumulant3", example={"input_ids": ids}, force=True)
    adapted(input_ids=ids).last_hidden_state.square().sum().backward()
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert trained
    assert all(parameter.grad is not None for parameter in trained)
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.1)
    adapted.eval()
    wanted = adapted(input_ids=ids).last_hidden_state
    save(adapted, tmp_path / "saved")
    torch.testing.assert_close(load(tmp_path / "saved")(input_ids=ids).last_hidden_state, wanted, atol=1e-5, rtol=1e-4)
    assert (tmp_path / "saved" / "adapter").is_dir()
