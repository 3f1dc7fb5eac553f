"""Random features: what one frozen layer can express."""

import pytest
import torch

from cumulant.studies import random_features as study


@pytest.mark.parametrize("name", ["cumulant2", "cumulant3", "cumulant3+full"])
def test_cumulant_heads_express_as_many_functions_as_their_moments_have(name):
    assert study.span(name, 0) == study.dimensions(name, 3)


def test_features_of_attention_do_not_depend_on_the_order_of_the_keys():
    x = study.prompts(20, 6, 4, 0)
    other = torch.cat([x[:, :1], x[:, 1:].flip(1)], 1)
    for name in ("RFA", "BRFA", "softmax", "cumulant3"):
        torch.testing.assert_close(study.features(name, x, 5, 0), study.features(name, other, 5, 0))
    assert not torch.allclose(study.features("RFMLP", x, 5, 0), study.features("RFMLP", other, 5, 0))


def test_the_query_with_the_covariance_is_what_the_second_order_learns_and_the_mean_alone_is_not():
    samples = (160,)
    x = study.prompts(samples[0] + 2 * study.TEST, 6, 3, 0)
    found = study.errors(study.features("cumulant2", x, 40, 0), study.targets(x), samples)
    assert found["f4 n=160"] < 1e-3
    assert found["f2 p=1 n=160"] > 0.9


def test_without_an_intercept_the_mean_of_biased_heads_hides_the_correlation():
    """The definition has none; with one, heads whose scores have an identity mean learn <x0, x> far better."""
    x = study.prompts(256 + 2 * study.TEST, 8, 8, 0)
    own, values = study.features("BRFA", x, 60, 0), {"f2 p=1": study.targets(x)["f2 p=1"]}
    plain, centred = (study.errors(own, values, (256,), intercept)["f2 p=1 n=256"] for intercept in (False, True))
    assert centred < 0.2 < 0.35 < plain


def test_without_an_intercept_a_constant_must_be_fitted_by_the_features():
    """The prediction is sum_m v_m . F_m: features that are 0 say 0, whatever the mean of the targets; with an intercept
    they say that mean, which is right here."""
    x, values = torch.zeros(30 + 2 * study.TEST, 4, dtype=torch.float64), torch.full((30 + 2 * study.TEST,), 5.0)
    x[0] = 1.0  # the kernel is not 0
    values = values.double() + torch.arange(len(values)) % 2  # variance 1/4 around 5.5
    without, with_one = (
        study.errors(x, {"f": values}, (30,), intercept)["f n=30"] for intercept in (False, True)
    )  # fmt: skip
    assert with_one == pytest.approx(1.0, rel=0.02)
    assert without == pytest.approx(1 + 5.5**2 / 0.25, rel=0.02)
