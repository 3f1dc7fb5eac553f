"""One step of training, made quick: blocks compiled once for all, and on one GPU the whole step as one CUDA graph.

A step of a small ViT is some nine hundred kernels. Started one by one from Python they take twice the time that the GPU
needs for them; as a graph they are started at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..models.parts import Repeated

PLAIN_CALLS = 2  # before recording: compilation, memory and the optimizer's state are made in them


def compile_blocks(model: nn.Module, mode: str | None) -> bool:
    """torch.compile every block of the model in place: equal blocks share their code, so that compiling takes as long
    as for one. False if the model has none."""
    blocks = [module for module in model.modules() if isinstance(module, Repeated)]
    for block in blocks:
        block.compile(dynamic=False, mode=mode)
    return bool(blocks)


@contextmanager
def quick_float32(device: torch.device, precision: str) -> Iterator[None]:
    """Where a recipe trains in bfloat16, let a GPU multiply what is left in float32 with 11 digits (TF32): mechanisms
    that widen their inputs would otherwise leave its tensor cores idle."""
    if device.type != "cuda" or precision != "bf16":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def room_for_compiled_code() -> Iterator[None]:
    """For many models in one process: let torch keep the compiled blocks of all their mechanisms. One that was trained
    before, with another seed say, is then not compiled again."""
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=1024):
        yield


class Recorded:
    """A function of CUDA tensors of fixed shapes that is called plainly at first, then recorded and replayed.

    What it returns is overwritten by the next call. Random numbers follow torch.manual_seed as in a plain call. Where
    recording fails, because something in the function waits for the device, a warning says so and calls stay plain.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.stream = torch.cuda.Stream()
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, ...] = ()
        self.output: Tensor | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        if self.graph is None and self.calls == PLAIN_CALLS:
            self._record(*inputs)
        self.calls += 1
        if self.graph is None:
            return self._plain(*inputs)
        for place, given in zip(self.inputs, inputs, strict=True):
            place.copy_(given)
        self.graph.replay()
        assert self.output is not None
        return self.output

    def _plain(self, *inputs: Tensor) -> Tensor:
        """On the stream of the recording: gradients remember where they were first added up."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            output = self.function(*inputs)
        torch.cuda.current_stream().wait_stream(self.stream)
        return output

    def _record(self, *inputs: Tensor) -> None:
        self.inputs = tuple(given.clone() for given in inputs)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        random = torch.cuda.default_generators[torch.cuda.current_device()]
        before = random.clone_state()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self.output = self.function(*self.inputs)
        except RuntimeError as error:
            # torch stays on the stream, and in the state of recording, in which no random number can be drawn any more.
            torch.cuda.set_stream(stream)
            random.graphsafe_set_state(before)
            torch.cuda.synchronize()
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"the step cannot be a CUDA graph and is run piece by piece: {reason}", stacklevel=2)
        else:
            self.graph = graph
