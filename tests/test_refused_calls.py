"""What a call cannot take is refused by the name of the argument, and a refused call changes nothing."""

import numpy as np
import pytest
import torch

import cumulant
from cumulant import Moments, attention, cluster_attention, conversion, create_model, nn, scores, zoo
from cumulant.cluster import KMeans, MergedStream, kmeans_assignment
from cumulant.distributed import shard, unshard

x, tokens = torch.randn(2, 4, 16, 8), torch.randn(2, 16, 32)
here = torch.ones(2, 16)
HUGE = 10**400  # finite, and no float


def layer(**options):
    return nn.MultiheadAttention(32, 4, **options)


def mechanism(name, **given):
    return zoo.get(name)(x, x, x, **given)


CALLS = [
    ("query_mask", lambda: attention(x, x, x, query_mask="x")),
    ("query_mask", lambda: mechanism("cumulant2", query_mask=torch.ones(2, 15))),
    ("query_mask", lambda: scores(x, x, query_mask=torch.full((2, 16), float("nan")))),
    ("query_mask", lambda: attention(x[..., :8, :], x, x, key_mask=here, query_mask=here)),
    ("scale", lambda: attention(x, x, x, scale=HUGE)),
    ("scale", lambda: cumulant.Stream(scale=HUGE)),
    ("prior", lambda: MergedStream(256, prior=HUGE)),
    ("softcap", lambda: MergedStream(256, softcap=HUGE)),
    ("rotary", lambda: layer(rotary=HUGE)),
    ("eps", lambda: mechanism("linear", eps=HUGE)),
    ("positions", lambda: scores(x, x, positions=torch.zeros(16, dtype=torch.long, device="meta"))),
    ("clusters", lambda: cluster_attention(x, x, x, clusters=torch.ones(2, 4, 16, dtype=torch.long).to_sparse())),
    ("prefix", lambda: cluster_attention(x, x, x, clusters=4, is_causal=True, prefix=np.ones(2))),
    ("prefix", lambda: mechanism("mala", prefix=None)),
    ("prefix", lambda: mechanism("rala", prefix=False)),
    ("grid", lambda: mechanism("focused_linear", grid=(-4, -4))),
    ("grid", lambda: mechanism("agent", agents=4, grid=(-4, -4))),
    ("key_bias", lambda: mechanism("agent", agents=4, key_bias=torch.ones(3))),
    ("query_bias", lambda: mechanism("agent", agents=4, query_bias=torch.ones(4, 3, 4))),
    ("channel_scale", lambda: mechanism("focused_linear", channel_scale=torch.ones(3))),
    ("tables", lambda: mechanism("hierarchical", tables=[1.0])),
    ("device", lambda: _packed("cosformer", x[0].mT.to("meta"))),
    ("order", lambda: shard(x, None, order="zig-zag")),
    ("x must be", lambda: shard(x.numpy(), None)),
    ("axis", lambda: unshard(x[0, 0, 0], None)),
    ("what moments become", lambda: Moments.of(x, x).to(torch.int64)),
    ("query must be as the tokens", lambda: _read_in_float64()),
    ("longest", lambda: nn.CumulantAttention(32, 4).forward_packed(tokens[0], torch.tensor([0, 16]), "2")),
    ("x must be on the device", lambda: layer()(tokens.to("meta"))),
    ("context must be on the device", lambda: layer()(tokens, tokens.to("meta"))),
    ("prefix", lambda: layer()(tokens, prefix="x")),
    ("prefix", lambda: layer()(tokens, prefix=17)),
    ("device", lambda: layer(device="nope")),
    ("dtype", lambda: layer(dtype=torch.int64)),
    ("dtype", lambda: layer(dtype=torch.complex64)),
    ("v_conv_init", lambda: layer(v_conv_init="ones")),
    ("gate", lambda: nn.CumulantAttention(32, 4, gate=np.ones(2))),
    ("scale", lambda: nn.create_layer("complexformer", 32, 4, scale=float("inf"))),
    ("start", lambda: nn.create_layer("gda", 32, 4, start=float("inf"))),
    ("tokens", lambda: nn.create_layer("sparsifiner", 32, 4, tokens=-3)),
    ("images must have the dtype", lambda: _vit()(torch.randn(2, 1, 8, 8).double())),
    ("images must be on the device", lambda: _vit()(torch.randn(2, 1, 8, 8, device="meta"))),
    ("dtype", lambda: create_model("vit_nano_patch2_8", dtype=torch.int64)),
    ("tokens", lambda: _lm()("abc")),
    ("tokens", lambda: _lm()(torch.ones(2, 3, dtype=torch.complex64))),
    ("tokens", lambda: _lm()(torch.ones(2, 3, dtype=torch.bool))),
    ("tokens must be numbers from 0 to 15", lambda: _lm()(torch.full((2, 3), 10**6))),
    ("tokens must be numbers from 0", lambda: _lm()(torch.full((2, 3), -1))),
    ("tokens must be on the device", lambda: _lm()(torch.ones(2, 3, dtype=torch.long, device="meta"))),
    ("batches", lambda: _convert(batches=0)),
    ("diagnosis", lambda: _convert(diagnosis="x")),
    ("options", lambda: _convert(options=["full"])),
    ("layers", lambda: _convert(layers=0)),
    ("output", lambda: _convert(output="x")),
    ("output", lambda: _convert(output=lambda *_: None)),
    ("data", lambda: _convert(data=[3])),
    ("check", lambda: conversion.load(".", check="no")),
    ("folder", lambda: conversion.load(None)),
    ("folder", lambda: conversion.save(_vit(), "")),
    ("model must be", lambda: conversion.load(".", model="x")),
]
OPTIONS = ["linear+chunk=0", "linear+eps=nan", "cosformer+max_len=NaN", "mala+use_rope=x", "lla+qk_norm=1",
           "focused_linear+power=nan", "flow+clamp=x", "cumulant2+around=median", "cumulant2+apart=-1",
           "cumulant2+full", "cumulant2+closure=x", "cumulant2+normalization=x", "cumulant2+backend=gpu",
           "aaren+chunk=1", "cluster4+sinks=-1", "cluster4+near=x", "cluster4+rank=x", "cluster4+response=x",
           "cluster4+find=x"]  # fmt: skip


def _packed(name, key):
    at = torch.tensor([0, 8])
    return zoo.get(name).varlen(x[0].mT, key, key, at, at)


def _vit():
    return create_model("vit_nano_patch2_8", num_classes=3).eval()


def _lm():
    return create_model("lm_nano", num_classes=16).eval()


def _convert(**given):
    return cumulant.convert(_vit(), "cumulant2", force=True, **given)


def _read_in_float64():
    stream = zoo.get("linear").stream()
    stream.append(x, x)
    return stream.read(x.double())


@pytest.mark.parametrize(("name", "call"), CALLS)
def test_the_error_names_the_argument(name, call):
    with pytest.raises((ValueError, TypeError), match=name):
        call()


@pytest.mark.parametrize("name", OPTIONS)
def test_wrong_options_in_a_name_are_refused_where_the_name_is_read(name):
    option = name.partition("+")[2].partition("=")[0]
    with pytest.raises((ValueError, TypeError), match=option):
        zoo.get(name)


@pytest.mark.parametrize("attention", ["softmax", "linear", "cumulant3"])
def test_a_first_step_that_is_refused_does_not_fix_the_batch_of_a_layers_stream(attention):
    stream = layer(attention=attention).eval().stream()
    with pytest.raises(ValueError, match="x must have shape"):
        stream.step(torch.randn(3, 1, 31))
    assert stream.step(tokens[:, :1]).shape == (2, 1, 32)


def test_no_queries_and_no_keys_make_an_empty_assignment():
    assert kmeans_assignment(x, x[:, :, :0], KMeans(4)).shape == (2, 4, 0)
