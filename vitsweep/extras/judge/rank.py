"""One side of a judgment: a fork server, and the ranks that it forks. It needs torch alone.

What runs here is the candidate's process: it may do as it likes. The judge believes what it can check
from outside, see `judging.sides`.
"""

import gc
import hashlib
import importlib._bootstrap_external as _bootstrap_external
import json
import os
import random
import resource
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

PERTURBATION = 2.0**-22
"""Relative change of weights and inputs whose effect shows how far rounding leads in float32."""
VARIATION = 2.0**-10
COUNTED_SEED = 1
OPENED: set[str] = set()
"""Paths that this process opened: a step may read a `.py` file that it does not import."""


class Cell(SimpleNamespace):
    """What `make_step` is given: sizes, and the path of the frozen cell for `vitsweep.apply`."""

    def __fspath__(self) -> str:
        """Return the path of `cell.yaml`."""
        return str(self.path)


class Channel:
    """JSON lines over a socket."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._reader = link, link.makefile("rb")

    def send(self, **entry: Any) -> None:
        """Send one line."""
        self._link.sendall(json.dumps(entry).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Return the next line; {} where the other end has gone."""
        line = self._reader.readline()
        return dict(json.loads(line)) if line.endswith(b"\n") else {}

    def close(self) -> None:
        """Close both directions."""
        self._reader.close()
        self._link.close()


def serve(control: socket.socket) -> None:
    """Fork the ranks of each run that is asked for, and wait for them."""
    while True:
        data, links, _, _ = socket.recv_fds(control, 2**16, 1024)
        if not data:
            return
        requests = json.loads(data)
        children = [_forked(*pair, control) for pair in zip(requests, links, strict=True)]
        for link in links:
            os.close(link)
        for child in children:
            os.waitpid(child, 0)


def _forked(request: dict[str, Any], link: int, control: socket.socket) -> int:
    child = os.fork()
    if child:
        return child
    control.close()
    channel = Channel(socket.socket(fileno=link))
    code = 1
    try:
        _run(request, channel)
        code = 0
    except BaseException as error:  # whatever it is, the judge must know why
        import traceback

        traceback.print_exc()
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if Path(f.filename).is_relative_to(request["root"])]
        where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
        if isinstance(error, FileNotFoundError):
            where += "; `--link PATH` shows both sides what git does not track"
        channel.send(failed=f"{type(error).__name__}: {error}{where}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return child


def _seed(seed: int) -> None:
    """Seed what code of the candidate draws from."""
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):  # which torch imports where there is one
        numpy.random.seed((seed + 1) % 2**32)  # equal seeds would give both equal bits


def _run(request: dict[str, Any], channel: Channel) -> None:
    """Open the step, warm up, train through the window when the judge says so, and hand over evidence."""
    _watch_files(os.path.realpath(request["root"]) + os.sep)
    here = str(Path(__file__).parent)
    sys.path[:] = [*request["paths"], *(p for p in sys.path if p != here), request["judge"]]
    os.environ.update(request["environment"])
    torch.set_num_threads(request["threads"])
    _seed(request["seed"])
    if request["script"]:
        _run_script(request, channel)
        return
    if request["make"]:
        torch.save(_imported(*request["make"])(Cell(**request["cell"])), request["examples"])
        channel.send(ready=True)
        channel.receive()
        channel.send(losses=[], sums={})
        channel.send(memory_gib=_peak_rss_gib(), modules={})
        return
    side = Side(request)
    if known := side.lacks(request["quality"]):
        channel.send(lacks=request["quality"], has=known)
        return
    side.train(request["warm_seed"], request["warm_steps"])
    if request["weights"]:
        side.save(f"{request['weights']}.start")
    gc.collect()
    channel.send(ready=True)
    seed = int(channel.receive()["go"])  # nobody knew it before the clock ran
    losses = side.train(seed, request["steps"])
    sums = {name: checksum(tensor) for name, tensor in side.weights().items()}
    channel.send(losses=losses, sums=sums)
    if request["weights"]:
        side.save(request["weights"])
    evidence = {"memory_gib": side.peak_gib(), "threads": torch.get_num_threads()}
    if request["count"]:
        evidence["flops"] = side.flops()
    if request["quality"]:
        evidence["quality"] = side.quality(request["quality"], losses)
    channel.send(**evidence, **environment(request["root"]))


def _watch_files(root: str) -> None:
    """Note the source files of a tree that are opened, and import none of them from cached bytecode.

    Bytecode is believed by the time of its source; who writes it into another side's tree replaces that
    side's code, and no hash of a source file shows it.
    """

    def note(event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(values[0], str) and values[0].endswith(".py"):
            OPENED.add(values[0])

    def cache_of(path: Any, *rest: Any, **options: Any) -> str:
        is_own = os.path.realpath(path).startswith(root) and "site-packages" not in str(path)
        if is_own:
            raise NotImplementedError  # what the loader takes for "there is none"
        found: str = cache_from_source(path, *rest, **options)
        return found

    sys.addaudithook(note)
    cache_from_source = _bootstrap_external.cache_from_source
    _bootstrap_external.cache_from_source = cache_of


def _run_script(request: dict[str, Any], channel: Channel) -> None:
    """Run a script that says itself where its loop begins and ends."""
    import runpy

    from vitsweep.extras.judge import measured

    measured.CHANNEL = channel
    sys.argv = [request["script"]]
    runpy.run_path(request["script"], run_name="__main__")
    if measured.CHANNEL is not None:
        raise RuntimeError("the script ended without `with vitsweep.measured():` around its loop")
    evidence = {"memory_gib": _peak_rss_gib(), "threads": torch.get_num_threads()}
    channel.send(**evidence, **environment(request["root"]))


class Side:
    """The candidate's step in this rank, and the batches that the judge gives it."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.device = torch.device(request["device"])
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.rank, self.ranks = request["rank"], request["ranks"]
        self.batch = request["cell"]["images_per_step"]
        self.examples = _varied(
            torch.load(request["examples"], map_location=self.device, weights_only=True),
            request["warm_seed"],
        )
        opened = _factory(request)(Cell(**request["cell"]))
        self.opened = opened
        self.step: Callable[[Any], Any] = opened.step if hasattr(opened, "step") else opened
        self.model = _model(opened)
        if self.model is None and not hasattr(opened, "weights"):
            raise TypeError(
                f"`make_step` returned {type(opened).__name__} without a model: set `step.model = model` "
                "before you return `step`, so that the judge can read the weights"
            )
        if request["perturbed"]:
            self._perturb()

    def train(self, seed: int, steps: int) -> list[float]:
        """Train on batches that the seed selects; return the loss of each step."""
        generator = torch.Generator().manual_seed(seed)
        _seed(seed)
        number = len(_first(self.examples)) - self.batch  # the last ones are held out
        losses = []
        for _ in range(steps):
            rows = torch.randint(number, (self.batch,), generator=generator)
            losses.append(_plain(self.step(self._rows(rows))))
        found: list[float] = torch.stack(losses).tolist() if losses else []
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return found

    def _rows(self, rows: Tensor) -> Any:
        own = rows.chunk(self.ranks)[self.rank].to(self.device)
        return tree_map_only(Tensor, lambda t: t[own], self.examples)

    def _perturb(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def changed(tensor: Tensor) -> Tensor:
            signs = torch.randint(2, tensor.shape, generator=generator) * 2 - 1
            return tensor * (1 + PERTURBATION * signs.to(tensor))

        with torch.no_grad():
            for parameter in self.model.parameters() if self.model is not None else ():
                parameter.copy_(changed(parameter))
        self.examples = tree_map_only(
            Tensor, lambda t: changed(t) if t.is_floating_point() else t, self.examples
        )

    def weights(self) -> dict[str, Tensor]:
        """Return whole weights and buffers by name."""
        if hasattr(self.opened, "weights"):
            return dict(self.opened.weights())
        assert self.model is not None
        return {name: t.detach() for name, t in self.model.state_dict().items()}

    def save(self, path: str) -> None:
        """Write the weights; rank 0 does."""
        weights = {name: t.to("cpu") for name, t in self.weights().items()}
        if self.rank == 0:
            torch.save(weights, path)

    def peak_gib(self) -> float:
        """Return the peak memory: of the device's allocator, or resident on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        return _peak_rss_gib()

    def flops(self) -> int:
        """Count the FLOPs of one step on this rank: matrix products, convolutions and attention."""
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            self.train(COUNTED_SEED, 1)
        return int(counter.get_total_flops())

    def lacks(self, name: str) -> list[str]:
        """Return which qualities there are, where the one that is asked for is none of them."""
        if name in ("", "loss") or callable(getattr(self.opened, name, None)):
            return []
        own = {**vars(type(self.opened)), **getattr(self.opened, "__dict__", {})}
        others = {"step", "model", "weights"}
        return ["loss", *(n for n in own if n[0] != "_" and callable(own[n]) and n not in others)]

    def quality(self, name: str, losses: list[float]) -> float:
        """Return the mean loss of the window's last quarter, or `step.NAME(batch)` of held-out examples."""
        if name == "loss":
            last = losses[-max(1, len(losses) // 4) :]
            return sum(last) / len(last)
        held_out = tree_map_only(Tensor, lambda t: t[-self.batch :], self.examples)
        return float(getattr(self.opened, name)(held_out))


def _factory(request: Mapping[str, Any]) -> Callable[[Cell], Any]:
    return _imported(*request["step"]) if request["step"] else _cell_step


def _cell_step(cell: Cell) -> Any:
    """Build the cell's model, and put its techniques around it, by the state of vitsweep under judgment."""
    import vitsweep  # for `apply`, by the name that every state has
    from vitsweep.execution.run_request import read_cell
    from vitsweep.model.build import build_model
    from vitsweep.results.provenance import trusting
    from vitsweep.results.store import Store

    path = Path(cell)
    with trusting(True):  # it was frozen by this command, and the code of the folder runs anyway
        spec = read_cell(Store(path.parents[2]), path.parent.name)
    return vitsweep.apply(spec, build_model(spec))


def _imported(file: str, name: str) -> Callable[[Cell], Any]:
    import importlib.util

    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    factory: Callable[[Cell], Any] = getattr(module, name)
    return factory


def _model(opened: Any) -> nn.Module | None:
    """Return the model of a step: its attribute `model`, or the only module that a closure holds."""
    held = [getattr(opened, "model", None), opened, getattr(opened, "__self__", None)]
    held += [cell.cell_contents for cell in getattr(opened, "__closure__", None) or ()]
    held += list(getattr(opened, "__dict__", {}).values())
    return next((each for each in held if isinstance(each, nn.Module)), None)


def _varied(examples: Any, seed: int) -> Any:
    """Scale each example a little, by other factors in each run: what was kept of an earlier one is wrong."""
    generator = torch.Generator().manual_seed(seed)

    def changed(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        factors = 1 + VARIATION * torch.rand(len(tensor), generator=generator)
        return tensor * factors.to(tensor).reshape(-1, *[1] * (tensor.ndim - 1))

    return tree_map_only(Tensor, changed, examples)


def _first(examples: Any) -> Tensor:

    tensor: Tensor = tree_leaves(examples)[0]
    return tensor


def _plain(loss: Any) -> Tensor:
    """Return a copy of a loss: a static buffer would hold the last one everywhere."""
    if isinstance(loss, float):
        return torch.tensor(loss)
    if type(loss) is not Tensor or loss.numel() != 1:
        raise TypeError(
            f"the step returned {type(loss).__name__}, and a loss is a float or a tensor of one value"
        )
    return loss.detach().reshape(()).float().clone()


def checksum(tensor: Tensor) -> int:
    """Return the sum of a tensor's bits, read as integers."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.is_floating_point():
        size = flat.element_size()
        flat = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    return int(flat.sum(dtype=torch.int64))


def _peak_rss_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def environment(root: str) -> dict[str, Any]:
    """Return versions, and file and hash of every imported module that is not Python's own."""
    own, tree = os.path.dirname(os.__file__), os.path.realpath(root) + os.sep
    modules = {}
    for name, module in list(sys.modules.items()):
        path = _located(getattr(module, "__file__", None) or "")
        if not path:
            continue
        is_python = path.startswith(own + os.sep) and "site-packages" not in path
        if name == "__main__" or is_python:
            continue
        inside = path.startswith(tree)
        is_installed = "site-packages" in path or "dist-packages" in path
        digest = "" if is_installed and not inside else _digest(path)
        modules[name] = [path, digest]
    known = {path for path, _ in modules.values()}
    for path in map(os.path.realpath, sorted(OPENED)):
        if path not in known and path.startswith(tree):
            with suppress(OSError):
                modules[path] = [path, _digest(path)]
    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    return {"modules": modules, "versions": versions}


@cache
def _located(file: str) -> str:
    """Return the real path of a module's file; "" where it has none."""
    return os.path.realpath(file) if os.path.isfile(file) else ""


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()[:12]


if __name__ == "__main__":
    with suppress(ImportError):  # each run would import it again otherwise: a second
        import torch._dynamo
    for module in list(sys.modules.values()):  # each run would look at these thousands again
        _located(getattr(module, "__file__", None) or "")
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
