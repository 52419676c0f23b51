"""The part of `gpu.py` that says where the time of a step goes."""

from collections.abc import Iterable
from typing import Any

import gpu_steps
import torch
from gpu_list import BASE, PROFILED
from gpu_steps import Figures, Run, cell_of, end_if_lost, largest_batch, our_step
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from vitsweep.extras.explain.kernel_kinds import TimeClass, kind_of_kernel, kind_of_operator


def profile(run: Run) -> None:
    """Where a step's time goes: kinds of kernels, and the time in which none runs."""
    images = run.figures_of("peers").get("images") or largest_batch(run.size, *BASE)
    results: dict[str, Any] = {}
    for name, choice in PROFILED.items():
        if run.is_late:
            results[name] = {"reason": gpu_steps.NO_TIME}
            continue
        try:
            results[name] = _shares_of_steps(run, images, *choice)
        except (Exception, SystemExit) as error:  # the other one goes on
            results[name] = {"reason": gpu_steps.reason_of(error)}
        run.write({"images": images, "cells": results})
        end_if_lost(run.size)
        gpu_steps.release(run.size)
    run.write({"images": images, "cells": results})


def _shares_of_steps(run: Run, images: int, *choice: str) -> Figures:
    step = our_step(cell_of(run.size, *BASE, *choice, images=images))
    for _ in range(run.size.steps):
        step()
    on_gpu = run.size.device == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    for _ in range(2):  # the first pays for the start of CUDA's tracer and is thrown away
        with torch.profiler.profile(activities=activities) as found:
            for _ in range(run.size.steps):
                step()
            if on_gpu:
                torch.cuda.synchronize()
    return shares(found.events(), on_gpu=on_gpu) | {"steps": run.size.steps}


def shares(events: Iterable[Any], *, on_gpu: bool) -> Figures:
    """Return milliseconds by kind; on a GPU also the share of time between kernels.

    Ranges that a program names (`record_function`; torch names every step of an optimizer) are shown
    on the GPU as well, around their kernels: they are none.
    """
    if on_gpu:
        kernels = [
            event
            for event in events
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        ]
    else:
        kernels = [event for event in events if not event.cpu_children]
    spent: dict[str, float] = {}
    for event in kernels:
        known = kind_of_kernel(event.name) if on_gpu else kind_of_operator(event.name)
        kind = str(known or TimeClass.host)
        spent[kind] = spent.get(kind, 0.0) + event.time_range.elapsed_us() / 1e3
    busy, end, begin = 0.0, float("-inf"), min(e.time_range.start for e in kernels)
    for event in sorted(kernels, key=lambda e: e.time_range.start):
        busy += max(0.0, event.time_range.end - max(end, event.time_range.start))
        end = max(end, event.time_range.end)
    gaps = 1 - busy / (end - begin)
    return {"ms by kind": spent, "share of time between kernels": gaps if on_gpu else None}
