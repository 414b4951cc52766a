# SPDX-License-Identifier: Apache-2.0
"""Timing by CUDA graph replay, and the bandwidth that times are held against."""

import re
import statistics
from collections.abc import Callable, Sequence

import torch

WARMUPS = 3


def time_calls(calls: Sequence[Callable[[], None]], replays: int) -> dict[str, float]:
    """Microseconds a call, median and spread over ``replays`` of a graph of all ``calls``.

    ``calls`` do the same work on different data; together they touch more than the L2 cache holds,
    so that a call finds none of its inputs there, as a layer of a model does not.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for replay in range(WARMUPS + replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= WARMUPS:
            times.append(begin.elapsed_time(end) * 1000 / len(calls))
    times.sort()
    return {
        "us": statistics.median(times),
        "us_p10": times[len(times) // 10],
        "us_p90": times[-1 - len(times) // 10],
    }


def launches(calls: Sequence[Callable[[], None]]) -> list[dict[str, float | str]]:
    """Kernels of all ``calls`` by name: launches a call, and median microseconds of a launch.

    Read off a profile of calls that are launched one by one, not as a graph.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for call in calls:
            call()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profiler.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = re.sub(r"\(anonymous namespace\)::|^void ", "", event.name)
            times.setdefault(re.sub(r"[<(].*", "", name), []).append(event.time_range.elapsed_us())
    return [
        {"name": name, "launches": len(each) / len(calls), "us": statistics.median(each)}
        for name, each in times.items()
    ]


def copy_bandwidth(size: int = 2**32, replays: int = 10) -> float:
    """Bytes a second, read plus written, of a device copy of ``size`` bytes.

    Launched one by one: as a node of a graph the same copy was seen to take half as long again.
    """
    source = torch.empty(size // 4, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    times = []
    for _ in range(WARMUPS + replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return 2 * size / statistics.median(times[WARMUPS:])
