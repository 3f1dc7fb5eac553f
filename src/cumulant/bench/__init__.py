"""Measurements: distance from softmax, cost in time, memory and work, accuracy of trained models."""

from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .cab import compositional_index as compositional_index
    from .cab import efficiency_length as efficiency_length
    from .error import softmax_error as softmax_error
    from .pareto import capture as capture
    from .pareto import error_against_cost as error_against_cost
    from .provenance import provenance as provenance
    from .scaling import Measurement as Measurement
    from .scaling import peak_memory as peak_memory
    from .scaling import scaling as scaling

lazy(__name__)
