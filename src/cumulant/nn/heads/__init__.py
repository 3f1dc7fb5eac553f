"""Published ways to use attention heads, each over any mechanism where its mathematics allows. One file each."""

# Importing registers; this is the order of `nn.layers()`.
from . import moh, sqa, gda, complexformer, gaam, rcmha, lama, sparsifiner, biformer, ia_red2, dual_stream, marro  # noqa: F401, I001
