"""Cumulant attention against ring softmax over a slow link: 4 workers in network namespaces, 1 Gbit/s and 10 ms.

    sudo python benchmarks/distributed_link.py            # table, and benchmarks/results/distributed_link.json
    sudo python benchmarks/distributed_link.py --quick
    sudo python benchmarks/distributed_link.py --together    # five idle cores: whole steps on the clock
    sudo python benchmarks/distributed_link.py --slept       # few cores: the same, with arithmetic slept

Each worker lives in a namespace of its own, 10 ms and 1 Gbit/s away from the others (`Link`; TCP keeps its window after
a pause, as on any tuned link). Float32, B 1, 12 heads of 64, 65,536 tokens in all.

Four workers need four idle cores, which a small machine does not have. So the two parts of a step are measured apart
and added: arithmetic as the processor time of one worker's part, alone, and messages as the time on the clock of the
same calls over the link with the arithmetic left out (cumulants: few tokens, since messages do not depend on them;
ring: the whole keys and values go round, nobody multiplies). The sum leaves no overlap to either side; for the ring the
larger of the two is printed as well, which is what perfect overlap would give it, and the ratio is taken of that. One
step of each, whole and on the clock, is measured beside it at a length that a small machine can carry.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import json
import os
import select
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed_scaling import HEADS, WIDTH, check, cumulants, softmax, step, tokens
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cumulant.bench.provenance import provenance
from cumulant.distributed import context_parallel
from cumulant.distributed.exchange import Workers
from cumulant.distributed.parts import Parts
from cumulant.distributed.softmax import Asked, _blocks, _blocks_and_gradients, _Part
from cumulant.kernels.dense import cpu

RESULTS = Path(__file__).parent / "results" / "distributed_link.json"
WORLD, DELAY, RATE, MTU = 4, 10e-3, 125e6, 32000  # seconds, bytes a second, bytes


def join_link(rank: int, path: str) -> None:
    """A network namespace of this process's own with one device, link0 at 10.77.0.x; its other end goes to `Link`."""
    if ctypes.CDLL(None, use_errno=True).unshare(0x40000000):  # CLONE_NEWNET
        raise SystemExit(f"no network namespace: {os.strerror(ctypes.get_errno())}; this needs root")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, 0x400454CA, struct.pack("16sH22x", b"link0", 0x1001))  # TUNSETIFF: tun, no header
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for name, what, value in (
            (b"link0", 0x8916, struct.pack("H2x4s8x", socket.AF_INET, bytes([10, 77, 0, rank + 1]))),  # address
            (b"link0", 0x8922, struct.pack("i12x", MTU)),
            (b"link0", 0x8943, struct.pack("i12x", 10000)),  # packets that may wait
            (b"link0", 0x8914, struct.pack("H14x", 0x41)),  # up and running
            (b"link0", 0x891C, struct.pack("H2x4s8x", socket.AF_INET, bytes([255, 255, 255, 0]))),  # who is beyond it
            (b"lo", 0x8914, struct.pack("H14x", 0x41)),
        ):
            fcntl.ioctl(asking, what, struct.pack("16s", name) + value)
    with suppress(OSError):
        Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")
    with socket.socket(socket.AF_UNIX) as to:
        to.connect(path)
        socket.send_fds(to, [bytes([rank])], [end])
        to.recv(1)
    os.close(end)


class Link(threading.Thread):
    """The switch between the workers' namespaces, which holds packets back.

    It needs no `netem` in the kernel and no tools: devices are tunnels whose other end this thread reads. A packet
    leaves its worker when those before it have left at RATE, and arrives DELAY later.
    """

    def __init__(self, path: str) -> None:
        super().__init__(daemon=True)
        self.path, self.going, self.ends = path, True, [-1] * WORLD
        self.door = socket.socket(socket.AF_UNIX)
        self.door.bind(path)
        self.door.listen(WORLD)

    def meet(self) -> None:
        """Waits for all workers, lets them go on together, and begins."""
        several = [self.door.accept()[0] for _ in range(WORLD)]
        for one in several:
            rank, (end,), *_ = socket.recv_fds(one, 1, 1)
            self.ends[rank[0]] = end
        for one in several:
            one.send(b".")
            one.close()
        self.start()

    def run(self) -> None:
        free = [0.0] * WORLD  # when each worker's line is free again
        waiting: list[tuple[float, int, int, bytes]] = []
        count = 0
        while self.going:
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, to, packet = heapq.heappop(waiting)
                with suppress(BlockingIOError):
                    os.write(self.ends[to], packet)
            patience = max(0.0, min(0.05, waiting[0][0] - time.monotonic())) if waiting else 0.05
            for end in select.select(self.ends, [], [], patience)[0]:
                with suppress(BlockingIOError):
                    for _ in range(64):
                        packet = os.read(end, MTU + 64)
                        rank, to = self.ends.index(end), packet[19] - 1
                        if packet[0] >> 4 == 4 and 0 <= to < WORLD:
                            free[rank] = max(free[rank], time.monotonic()) + len(packet) / RATE
                            count += 1
                            heapq.heappush(waiting, (free[rank] + DELAY, count, to, packet))

    def stop(self) -> None:
        self.going = False
        if self.is_alive():
            self.join()
        for end in self.ends:
            if end >= 0:
                os.close(end)
        self.door.close()


def clocked(work: Callable[[], object], rounds: int) -> float:
    """Seconds of the slowest worker, median."""
    times = []
    for i in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        work()
        spent = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        if i:
            times.append(float(spent))
    return statistics.median(times)


def together(rank: int, path: str, quick: bool, only: list[str]) -> None:
    """Whole steps on the clock, each worker on a core of its own, beside one worker with all tokens."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > WORLD:  # the switch has another; a thread of gloo and the arithmetic share one
        os.sched_setaffinity(0, {cores[rank]})
    mesh = meet(rank, path)
    whole, rounds = (4096, 2) if quick else (65536, 5)
    short = whole // 4  # of softmax, which takes minutes for all
    found: dict[str, dict[str, float]] = {}
    calls = {"cumulant2": cumulants(2), "cumulant3": cumulants(3), "cumulant3 causal": cumulants(3, True)}
    for name, call in {**calls, "softmax": softmax}.items():
        if only and name not in only:
            continue
        check(mesh, call)
        n, times = (short, 1) if name == "softmax" else (whole, rounds if "causal" not in name else 2)
        for which, backward in (("forward", False), ("both", True)):
            if name == "softmax" and backward:
                continue
            row = found[f"{name} {which}"] = {"tokens": n}
            # Causal: a quarter of the tokens, four times; plain torch is linear in the length.
            share = WORLD if "causal" in name else 1
            alone = tokens(n // share) if rank == 0 else tokens(4)
            if name != "softmax":
                row["one worker"] = share * clocked(lambda c=call, x=alone, b=backward: step(c, x, b), times)
            part = tokens(n // WORLD)
            for title, overlap in (("split", False), ("split, in halves", True)):
                if overlap and ("causal" in name or name == "softmax"):
                    continue
                with context_parallel(mesh, overlap=overlap):
                    row[title] = clocked(lambda c=call, x=part, b=backward: step(c, x, b), times)
                if name != "softmax":
                    row[f"{title}, over an ideal quarter"] = row[title] / (row["one worker"] / WORLD)
            if rank == 0:
                print(f"{name} {which}", *(f"{key} {value:.4g}  " for key, value in row.items()), flush=True)
                Path(path + ".json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


class Stages:
    """The passes over tokens of `kernels.dense.cpu`, two forward and two backward, twice that in halves.

    With `times` each does what it is given, a few tokens, and then sleeps so long; without, the processor time of each
    is written down.
    """

    def __init__(self, times: list[float] | None = None) -> None:
        self.given, self.found, self.run = times, list[float](), cpu._run

    def __enter__(self) -> list[float]:
        cpu._run = self
        return self.found

    def __exit__(self, *_: object) -> None:
        cpu._run = self.run

    def __call__(self, *arguments: Any) -> list[Any]:
        start = time.process_time()
        answer = self.run(*arguments)
        self.found.append(time.process_time() - start)
        if self.given is not None:
            time.sleep(max(0.0, self.given[(len(self.found) - 1) % len(self.given)]))
        return answer


def stages(whole: int, part: int) -> dict[str, list[float]]:
    """Processor seconds of each pass, for one worker's part and for all tokens; the least of five times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    found = {}
    for order in (2, 3):
        for backward in (False, True):
            for n, who in ((part, "part"), (whole, "one worker")):
                for overlap in (False, True) if who == "part" else (False,):
                    x, runs = tokens(n), []
                    with context_parallel(mesh, overlap=overlap):
                        for _ in range(6):
                            with Stages() as times:
                                step(cumulants(order), x, backward)
                            runs.append(times)
                    name = f"cumulant{order} {'both' if backward else 'forward'} {who}{', in halves' * overlap}"
                    found[name] = [min(one) for one in zip(*runs[1:], strict=True)]
    dist.destroy_process_group()
    return found


def slept(rank: int, path: str, quick: bool) -> None:
    """Whole steps on the clock where cores are few: messages go over the link, arithmetic is slept."""
    mesh, times = meet(rank, path), json.loads(Path(path + ".stages").read_text())
    found: dict[str, float] = {}
    few = tokens(8)
    for name, given in times.items():
        if "part" not in name:
            continue
        call = cumulants(int(name[8]))
        check(mesh, call)
        with context_parallel(mesh, overlap="halves" in name), Stages(given):
            found[name] = clocked(lambda c=call, b="both" in name: step(c, few, b), 3 if quick else 15)
    if rank == 0:
        Path(path + ".json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def meet(rank: int, path: str) -> DeviceMesh:
    torch.set_num_threads(1)
    join_link(rank, path + ".link")
    os.environ["GLOO_SOCKET_IFNAME"] = "link0"
    dist.init_process_group("gloo", store=dist.FileStore(path, WORLD), rank=rank, world_size=WORLD)
    return init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("dp", "cp"))


def worker(rank: int, path: str, quick: bool) -> None:
    mesh = meet(rank, path)
    whole, part, rounds = (4096, 1024, 2) if quick else (65536, 16384, 7)
    found: dict[str, float] = {}
    calls = {"cumulant2": cumulants(2), "cumulant3": cumulants(3), "cumulant3 causal": cumulants(3, True)}
    for call in calls.values():
        check(mesh, call)
    with context_parallel(mesh):
        for name, call in calls.items():
            for backward in (False, True):
                which = "both" if backward else "forward"
                few = tokens(64 if "causal" in name else 8)
                found[f"{name} {which} messages"] = clocked(lambda c=call, b=backward, x=few: step(c, x, b), rounds)
    parts = Parts(Workers.of(mesh), lengths=[part] * WORLD)
    asked = Asked(parts, [part] * WORLD, WIDTH**-0.5, False, "ring")
    key, value = tokens(part)[1:]
    found["softmax forward messages"] = clocked(lambda: [None for _ in _blocks(asked, [key, value])], 2)

    def back() -> None:
        grads = [torch.zeros_like(key), torch.zeros_like(value)]
        for _ in _blocks_and_gradients(asked, [key, value], grads):
            pass

    found["softmax both messages"] = found["softmax forward messages"] + clocked(back, 1)
    short = 1024 if quick else 4096
    check(mesh, softmax)
    with context_parallel(mesh):
        for name, call in {**calls, "softmax": softmax}.items():
            x = tokens(short // WORLD)
            found[f"{name} both on the clock, {short} tokens"] = clocked(lambda c=call, x=x: step(c, x, True), 3)
    if rank == 0:
        Path(path + ".json").write_text(json.dumps({"seconds": found, "tokens": whole, "part": part}))
    dist.barrier()
    dist.destroy_process_group()


def processor_seconds(work: Callable[[], object], rounds: int) -> float:
    """Of this process, the least of the rounds: waiting for a core, or for another's memory, is not work."""
    times = []
    for _ in range(rounds + 1):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times[1:])


def arithmetic(whole: int, part: int, rounds: int) -> dict[str, float]:
    """Processor seconds of one worker's part, and of all tokens on one worker."""
    torch.set_num_threads(1)
    found = {}
    for name, call in {"cumulant2": cumulants(2), "cumulant3": cumulants(3)}.items():
        for n, who in ((part, "part"), (whole, "one worker")):
            for backward in (False, True):
                which = "both" if backward else "forward"
                x = tokens(n)
                found[f"{name} {which} {who}"] = processor_seconds(
                    lambda c=call, x=x, b=backward: step(c, x, b), rounds
                )
    causal, n = cumulants(3, True), part // 4  # plain torch, linear in the length
    x = tokens(n)
    for backward in (False, True):
        spent = processor_seconds(lambda b=backward: step(causal, x, b), 1)
        for who, times in (("part", part / n), ("one worker", whole / n)):
            found[f"cumulant3 causal {'both' if backward else 'forward'} {who}"] = spent * times
    # One head of one block of the ring; a worker has HEADS of each of WORLD blocks.
    query, key, value = (y[:, :1] for y in tokens(part))
    block = _Part(query, key, value, None, WIDTH**-0.5, False)
    out, lse = block.forward()
    times = HEADS * WORLD
    found["softmax forward part"] = times * processor_seconds(block.forward, 1)
    back = processor_seconds(lambda: block.backward(out, out, lse), 1)
    found["softmax both part"] = found["softmax forward part"] + times * back
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--together", action="store_true", help="whole steps on the clock: needs five idle cores")
    parser.add_argument("--slept", action="store_true", help="the same for few cores: messages go, arithmetic is slept")
    parser.add_argument("--only", nargs="*", default=[], help="with --together, these mechanisms")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store")
    options = parser.parse_args()
    if options.rank is not None:
        if options.together:
            together(options.rank, options.store, options.quick, options.only)
        elif options.slept:
            slept(options.rank, options.store, options.quick)
        else:
            worker(options.rank, options.store, options.quick)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/store"
        link_between = Link(path + ".link")
        if options.slept:
            times = stages(4096, 1024) if options.quick else stages(65536, 16384)
            Path(path + ".stages").write_text(json.dumps(times))
        command = [sys.executable, __file__, "--store", path, *["--quick"] * options.quick]
        command += [
            *["--slept"] * options.slept,
            *["--together"] * options.together,
            *(["--only", *options.only] if options.only else []),
        ]
        several = [subprocess.Popen([*command, "--rank", str(r)]) for r in range(WORLD)]
        try:
            link_between.meet()
            failed = [one.wait() for one in several]
            if any(failed):
                raise SystemExit("a worker failed")
        finally:
            link_between.stop()
            for one in several:
                one.kill()
        found = json.loads(Path(path + ".json").read_text())
    how = " --together" * options.together + " --slept" * options.slept
    record = provenance("python benchmarks/distributed_link.py" + how)
    record["link"] = {"workers": WORLD, "seconds of delay": DELAY, "bytes a second": RATE}
    if options.slept:
        rows = {}
        for name, seconds in found.items():
            one = sum(times[name.replace(", in halves", "").replace("part", "one worker")])
            rows[name] = {
                "seconds": seconds,
                "arithmetic": sum(times[name]),
                "over an ideal quarter": seconds * WORLD / one,
            }
            print(f"{name:40}", *(f"{key} {value:.4f}  " for key, value in rows[name].items()))
        if not options.quick:
            to = RESULTS.with_name("distributed_slept.json")
            to.write_text(json.dumps({**record, "tokens": 65536, "rows": rows, "passes": times}, indent=1) + "\n")
        return
    if options.together:
        if not options.quick:
            to = Path(os.environ.get("OUT", RESULTS.parent)) / "distributed_together.json"
            to.write_text(json.dumps({**record, "seconds": found}, indent=1) + "\n")
        return
    link = found["seconds"]
    own = arithmetic(found["tokens"], found["part"], 2 if options.quick else 4)
    table = {}
    for which in ("forward", "both"):
        ring = own[f"softmax {which} part"], link[f"softmax {which} messages"]
        table[f"softmax ring {which}"] = {
            "arithmetic": ring[0],
            "messages": ring[1],
            "sum": sum(ring),
            "larger": max(ring),
        }
        for name in ("cumulant2", "cumulant3", "cumulant3 causal"):
            work, message = own[f"{name} {which} part"], link[f"{name} {which} messages"]
            alone = own[f"{name} {which} one worker"]
            table[f"{name} {which}"] = {
                "arithmetic": work,
                "messages": message,
                "sum": work + message,
                "over an ideal quarter": (work + message) / (alone / WORLD),
                "ring over it": max(ring) / (work + message),
            }
    for name, row in table.items():
        print(f"{name:26}", *(f"{key} {value:8.3f}  " for key, value in row.items()))
    clock = {name: value for name, value in link.items() if "clock" in name}
    print(*(f"{name:52} {value:8.3f} s" for name, value in clock.items()), sep="\n")
    if not options.quick:
        found = {"seconds": table, "on the clock": clock, "one worker": own}
        RESULTS.write_text(json.dumps({**record, "tokens": 65536, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
