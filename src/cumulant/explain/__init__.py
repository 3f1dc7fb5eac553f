"""Seeing attention: maps of any layer, head and query, summaries of heads, and figures."""

from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from ..inspect.sites import Site as Site
    from ..inspect.sites import find_sites as find_sites
    from ..inspect.sites import model_info as model_info
    from ..inspect.tokens import TokenLayout as TokenLayout
    from . import figures as figures
    from .capture import Captured as Captured
    from .capture import Recording as Recording
    from .capture import capture as capture
    from .capture import record as record
    from .flow import relevance as relevance
    from .flow import rollout as rollout
    from .flow import token_map as token_map
    from .heads import block_off as block_off
    from .heads import head_means as head_means
    from .heads import head_off as head_off
    from .importance import PruningCurve as PruningCurve
    from .importance import head_importance as head_importance
    from .importance import jensen_shannon as jensen_shannon
    from .importance import partial_importance as partial_importance
    from .importance import pruning_curve as pruning_curve
    from .importance import pruning_curves as pruning_curves
    from .importance import rank_correlations as rank_correlations
    from .importance import ranked as ranked
    from .metrics import Profile as Profile
    from .metrics import entropy as entropy
    from .metrics import mean_distance as mean_distance
    from .metrics import negative_mass as negative_mass
    from .metrics import patch_distances as patch_distances
    from .metrics import received as received
    from .metrics import ring_profile as ring_profile
    from .metrics import sink_rate as sink_rate
    from .metrics import summary as summary
    from .metrics import tokens_used as tokens_used
    from .metrics import uniform_distance as uniform_distance
    from .patterns import Patterns as Patterns
    from .patterns import find_patterns as find_patterns
    from .patterns import flat_maps as flat_maps

lazy(__name__)
