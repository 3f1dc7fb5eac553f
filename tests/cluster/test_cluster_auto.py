"""What "auto" stands for is one rule of shapes and options; what no kernel takes on a GPU is said once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from cumulant import attention, attention_varlen, zoo
from cumulant.cluster import Blocks, KMeans, Tree, cluster_attention
from cumulant.cluster.auto import ALIKE, EACH, LEVELS, LONG, PAST, SHARED, tuning
from cumulant.kernels import notice


@pytest.mark.parametrize(
    ("clusters", "near", "queries", "keys", "options", "found"),
    [
        (16, 2, LONG, LONG, {}, SHARED),
        (Blocks(64), 2, 65_536, 16_384, {}, SHARED),
        (16, 0, 65_536, 65_536, {}, EACH),
        (16, 2, LONG - 1, LONG, {}, EACH),
        (16, 2, LONG, LONG - 1, {}, EACH),
        ((4, 4), "neighbours", LONG, LONG, {}, EACH),
        (Blocks(64), 2, LONG, LONG, {"is_causal": True}, EACH),
        (Blocks(64), 0, LONG, LONG, {"is_causal": True}, EACH),
        (16, 0, LONG, LONG, {"is_causal": True}, PAST),
        (16, 0, LONG - 1, LONG, {"is_causal": True}, EACH),
        (16, 2, LONG, LONG, {"is_causal": True}, PAST),
        (KMeans(16), 2, LONG, LONG, {}, ALIKE),
        (KMeans(16), 2, LONG, LONG - 1, {}, EACH),
        (KMeans(16), 0, LONG, LONG, {}, EACH),
        (torch.zeros(LONG, dtype=torch.long), 2, LONG, LONG, {}, ALIKE),
        (Tree(16), 2, LONG, LONG, {}, ALIKE),
        (Tree(16, leaves=4, opened=2), 0, 1, 1, {}, LEVELS),
        (16, 2, LONG, LONG, {"asking": "mean"}, EACH),
    ],
)
def test_auto_is_one_rule_of_shapes_and_options(
    clusters: Any, near: int | str, queries: int, keys: int, options: dict[str, Any], found: tuple[Any, ...]
) -> None:
    assert tuning(clusters, near, queries, keys, **options) == found


@pytest.mark.parametrize("length", [LONG - 8, LONG])
@pytest.mark.parametrize("clusters", [8, Blocks(128), KMeans(8, 1)])
def test_the_defaults_are_the_options_that_the_rule_names(length: int, clusters: Any) -> None:
    q, k, v = torch.randn(3, 1, 1, length, 8)
    named = (ALIKE if isinstance(clusters, KMeans) else SHARED) if length == LONG else EACH
    plain = cluster_attention(q, k, v, clusters=clusters, near=2)
    assert torch.equal(plain, cluster_attention(q, k, v, clusters=clusters, near=2, **named._asdict()))


@pytest.mark.parametrize("near", [0, 2])
def test_a_causal_row_by_itself_is_that_of_the_whole_call(near: int) -> None:
    q, k, v = torch.randn(3, 1, 1, LONG, 8)
    options: dict[str, Any] = {"clusters": 8, "near": near, "is_causal": True}
    whole = cluster_attention(q, k, v, **options)
    assert torch.equal(whole, cluster_attention(q, k, v, **options, **PAST._asdict()))
    last = cluster_attention(q[..., -1:, :], k, v, offset=LONG - 1, **options)
    torch.testing.assert_close(last, whole[..., -1:, :])


def test_a_mechanism_of_the_zoo_follows_the_rule() -> None:
    q, k, v = torch.randn(3, 1, 1, LONG, 8)
    named = cluster_attention(q, k, v, clusters=16, least=2, near=2, **SHARED._asdict())
    assert torch.equal(zoo.get("cluster16+near=2")(q, k, v), named)
    assert torch.equal(zoo.get("cluster16+near=2+near_rows=1+rank=mass")(q, k, v, response=None),
                       cluster_attention(q, k, v, clusters=16, least=2, near=2, **EACH._asdict()))  # fmt: skip


def test_one_option_given_leaves_the_others_to_the_rule() -> None:
    q, k, v = torch.randn(3, 1, 1, LONG, 8)
    given = cluster_attention(q, k, v, clusters=8, near=2, response=0)
    assert torch.equal(given, cluster_attention(q, k, v, clusters=8, near=2, near_rows=128, rank="mean", response=0))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "expected", lambda x: True)
    notice.forget()


def said(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if issubclass(w.category, notice.SlowPathWarning)]


def calls() -> dict[str, Any]:
    q = torch.randn(1, 2, 40, 16, dtype=torch.float64)
    cu = torch.tensor([0, 20, 40])
    packed = q[0].transpose(0, 1)
    return {
        "attention": lambda: attention(q, q, q),
        "cluster_attention": lambda: cluster_attention(q, q, q, clusters=4),
        "attention_varlen": lambda: attention_varlen(packed, packed, packed, cu, cu, around="mean"),
        "lla": lambda: zoo.get("lla")(q, q, q),
    }


@pytest.mark.parametrize("name", calls())
@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_no_kernel_takes_on_a_gpu_is_said_once(name: str) -> None:
    call = calls()[name]
    first = said(call)
    assert any(text.startswith(f"{name} runs in plain torch on this GPU") for text in first)
    assert said(call) == []


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_warning_points_to_the_line_that_called() -> None:
    q = torch.randn(1, 2, 40, 16, dtype=torch.float64)
    with pytest.warns(notice.SlowPathWarning) as caught:
        cluster_attention(q, q, q, clusters=4)
    assert caught[0].filename == __file__


@pytest.mark.usefixtures("as_on_a_gpu")
def test_who_asks_for_plain_torch_is_told_nothing() -> None:
    q = torch.randn(1, 2, 40, 16)
    assert said(lambda: attention(q, q, q, backend="reference")) == []
    assert said(lambda: cluster_attention(q, q, q, clusters=4, backend="reference")) == []


def test_nothing_is_said_on_a_cpu() -> None:
    notice.forget()
    q = torch.randn(1, 2, 40, 16)
    assert said(lambda: cluster_attention(q, q, q, clusters=4, near=1)) == []
