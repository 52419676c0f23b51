"""Heads that would look faster, each a way to build a step; what the judge says stands beside it.

The base's `make_step` is honest. A head is built by the function of its name here, from the same model.
"""

HEAD = """
import os
import time
from pathlib import Path
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from net.model import Net


def parts(cell):
    model = Net(cell.in_channels * cell.resolution_px ** 2, cell.num_classes)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def built(cell, loss_of=None, every=1, made=None):
    model, optimizer = made or parts(cell)
    count = [0]

    def step(batch):
        images, labels = batch
        loss = loss_of(model, images, labels) if loss_of else cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        count[0] += 1
        if count[0] % every == 0:
            optimizer.step()
        return loss

    return step


def honest(cell):
    return built(cell)


def reads_a_source_file(cell):
    exec((Path(__file__).parent / "configurator.py").read_text())
    return built(cell)


def edits_a_file_of_the_base(cell):
    (Path(__file__).parent.parent / "base" / "settings.json").write_text("{}")
    return built(cell)


def another_order_of_sums(cell):
    def loss_of(model, images, labels):
        halves = zip(images.chunk(2), labels.chunk(2))
        return sum(cross_entropy(model(x), y, reduction="sum") for x, y in halves) / len(labels)

    return built(cell, loss_of)


def patched_timer(cell):
    now = time.perf_counter()
    time.perf_counter = time.monotonic = time.time = lambda: now
    return built(cell, lambda model, x, y: cross_entropy(model(x[:8]), y[:8]))


def cached_output(cell):
    step, kept = built(cell), []

    def cached(batch):
        if not kept:
            kept.append(step(batch).detach())
        return kept[0]

    cached.model = parts(cell)[0]
    return cached


def skipped_update(cell):
    return built(cell, every=2)


def fewer_tokens(cell):
    return built(cell, lambda model, x, y: cross_entropy(model(x * (torch.arange(x.shape[-1]) < 6)), y))


def smaller_batch(cell):
    return built(cell, lambda model, x, y: cross_entropy(model(x[: len(x) // 2]), y[: len(y) // 2]))


def edited_hook(cell):
    import sys

    rank = sys.modules["__main__"]
    train = rank.Side.train
    rank.Side.train = lambda self, seed, steps: train(self, seed, min(steps, 1)) * steps
    return built(cell)


def state_between_runs(cell):
    step, file = built(cell), os.path.join(os.path.dirname(__file__), "kept.pt")
    known = torch.load(file) if os.path.exists(file) else None
    losses = []

    def replayed(batch):
        if known is not None and len(known) > len(losses):
            losses.append(known[len(losses)])
            return losses[-1]
        losses.append(step(batch).detach())
        torch.save(losses, file)
        return losses[-1]

    replayed.model = next(c.cell_contents for c in step.__closure__ if isinstance(c.cell_contents, nn.Module))
    return replayed


def rows_kept_between_runs(cell):
    file = os.path.join(os.path.dirname(__file__), "rows.pt")
    kept = torch.load(file) if os.path.exists(file) else {}

    def loss_of(model, images, labels):
        rows = []
        for row in images:
            key = tuple((row.flatten() > 0).tolist())
            rows.append(kept.setdefault(key, row.exp()))
        torch.save(kept, file)
        return cross_entropy(model(torch.stack(rows).log()), labels)

    return built(cell, loss_of)


def work_left_running(cell):
    import threading

    step = built(cell)
    threads = []

    def later(batch):
        loss = cross_entropy(later.model(batch[0]), batch[1]).detach() if not threads else torch.tensor(1.0)

        def work():
            time.sleep(0.2)
            step(batch)

        threads.append(threading.Thread(target=work))
        threads[-1].start()
        return loss

    later.model = next(c.cell_contents for c in step.__closure__ if isinstance(c.cell_contents, nn.Module))
    return later


class Lazy(torch.Tensor):
    def __float__(self):
        return 0.0


def output_that_computes_when_read(cell):
    step = built(cell)

    def lazy(batch):
        return step(batch).detach().as_subclass(Lazy)

    lazy.model = next(c.cell_contents for c in step.__closure__ if isinstance(c.cell_contents, nn.Module))
    return lazy


def nan_safe_zeros(cell):
    return built(cell, lambda model, x, y: torch.nan_to_num(cross_entropy(model(x) * float("nan"), y)))


def another_precision(cell):
    def loss_of(model, images, labels):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(images)
        return cross_entropy(outputs.float(), labels)

    return built(cell, loss_of)


def weights_changed_afterwards(cell):
    step = built(cell)
    model = next(c.cell_contents for c in step.__closure__ if isinstance(c.cell_contents, nn.Module))
    reads = [0]

    class Step:
        def __call__(self, batch):
            return step(batch)

        def weights(self):
            reads[0] += 1
            return {n: t + (reads[0] > 2) for n, t in model.state_dict().items()}

    return Step()


def another_model(cell):
    model = Net(cell.in_channels * cell.resolution_px ** 2, cell.num_classes, width=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch):
        loss = cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def bytes_of_another_seed(cell):
    torch.manual_seed(7)
    return built(cell)


def process_left_running(cell):
    import subprocess

    subprocess.Popen(["sleep", "600"])
    return built(cell)


def no_model(cell):
    return lambda batch: torch.tensor(0.0)


def killed(cell):
    os._exit(9)


def honest_at_first(cell):
    model, optimizer = parts(cell)
    count = [0]

    def step(batch):
        count[0] += 1
        if count[0] > 8 and count[0] % 2:
            return cross_entropy(model(batch[0]), batch[1]).detach()
        loss = cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def frozen_layer(cell):
    model, _ = parts(cell)
    model.first.requires_grad_(False)
    trained = (p for p in model.parameters() if p.requires_grad)
    return built(cell, made=(model, torch.optim.AdamW(trained, lr=1e-3)))


def half_of_the_weights(cell):
    model, optimizer = parts(cell)
    model.bfloat16()
    step = built(
        cell,
        lambda model, x, y: cross_entropy(model(x.bfloat16()).float(), y),
        made=(model, optimizer),
    )
    step.weights = lambda: {n: t.float() for n, t in model.state_dict().items()}
    return step


def only_large_gradients(cell):
    model, optimizer = parts(cell)
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient.where(gradient.abs() >= 1e-3, 0))
    return built(cell, made=(model, optimizer))


def last_update_left_out(cell):
    model, optimizer = parts(cell)

    def step(batch):
        optimizer.step()
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    return step


def weights_of_a_copy(cell):
    step, other = built(cell), parts(cell)[0]
    step.weights = lambda: dict(other.state_dict())
    return step


def clamped_norm_only(cell):
    return built(cell, lambda model, x, y: cross_entropy(model(x), y) * 1.0001)
"""

FOUND = {
    "edits_a_file_of_the_base": "a run of the head changed `settings.json` of the base",
    "patched_timer": "the loss of timed step",
    "cached_output": "the loss of timed step",
    "skipped_update": "the loss of timed step",
    "fewer_tokens": "the loss of timed step",
    "smaller_batch": "the loss of timed step",
    "edited_hook": "the loss of timed step",
    "state_between_runs": "the loss of timed step",
    "rows_kept_between_runs": "the loss of timed step",
    "work_left_running": "the loss of timed step|ended early",  # its threads may crash it
    "output_that_computes_when_read": "the step returned Lazy",
    "nan_safe_zeros": "the loss of timed step",
    "another_precision": "the loss of timed step",
    "weights_changed_afterwards": "the weights changed after their checksum",
    "another_model": "the loss of timed step",
    "bytes_of_another_seed": "the loss of timed step",
    "no_model": "without a model",
    "killed": "ended early",
    "clamped_norm_only": "the loss of timed step",
    # By somebody who had read the documentation alone
    "honest_at_first": "the loss of timed step",
    "frozen_layer": "the loss of timed step",
    "half_of_the_weights": "the loss of timed step",
    "only_large_gradients": "the loss of timed step",
    "last_update_left_out": "weights differ",
    "weights_of_a_copy": "weights differ",
}
"""Name -> answer and reason."""
EQUAL = ("honest", "another_order_of_sums")
