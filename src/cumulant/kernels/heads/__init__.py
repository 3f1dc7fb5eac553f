"""Kernels of the layers in `nn.heads`: phases (ComplexFormer), chosen rows (MoH), chosen regions (BiFormer)."""
