"""The one view of all mixers has every name of the registries and says what they say."""

from cumulant import nn, zoo
from tools.unified_view import LAYERS, PAGE, P, family, page


def test_every_mechanism_and_layer_has_its_mixing_matrix_and_no_other():
    assert set(P) == {family(name) for name in zoo.names()}
    assert set(LAYERS) == set(nn.layers())


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "write it again: python -m tools.unified_view"
