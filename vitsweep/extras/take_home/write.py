"""From a cell to the text of a file that trains as it does: what the templates are given."""

import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pprint import pformat
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from vitsweep.errors import ImpossibleCellError, VitsweepError
from vitsweep.extras.take_home.refusals import refusals
from vitsweep.model.module_spec import ModuleSpec
from vitsweep.model.user_module import find_blocks, without_weights
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.model_spec import ViTSpec
from vitsweep.techniques.memory.checkpointed_blocks import OPERATIONS
from vitsweep.techniques.memory.recompute import RecomputeSelected
from vitsweep.techniques.optimizer.adamw import AdamW
from vitsweep.techniques.sharding.fsdp import Hsdp

HALF = ("float16", "bfloat16")
NAMES = {
    "collections.abc": "Iterator",
    "contextlib": "nullcontext",
    "functools": "partial",
    "torch": "Tensor nn",
    "torch.amp": "GradScaler",
    "torch.distributed.checkpoint.state_dict": "StateDictOptions get_model_state_dict",
    "torch.distributed.device_mesh": "init_device_mesh",
    "torch.distributed.fsdp": "MixedPrecisionPolicy fully_shard",
    "torch.distributed.fsdp.sharded_grad_scaler": "ShardedGradScaler",
    "torch.distributed.tensor": "Shard",
    "torch.nn.attention": "SDPBackend sdpa_kernel",
    "torch.nn.parallel": "DistributedDataParallel",
    "torch.nn.utils": "clip_grad_norm_",
    "torch.utils.checkpoint": "CheckpointPolicy checkpoint create_selective_checkpoint_contexts",
    "transformers": "AutoConfig AutoModelForImageClassification",
}
"""Module -> names that are imported from it where a file has them."""
MODULES = {name: name for name in ("os", "timm", "torch")} | {
    "dist": "torch.distributed as dist",
    "F": "torch.nn.functional as F",
}


def written(cell: CellSpec, name: str, header: list[str]) -> str:
    """Return the text of the file.

    Args:
        cell: what the file does.
        name: of the file, for the command that starts it.
        header: lines of its docstring.

    Raises:
        ImpossibleCellError: the cell has techniques that are no plain PyTorch; all are named.
    """
    if reasons := refusals(cell):
        raise ImpossibleCellError(reasons)
    environment = Environment(
        loader=PackageLoader("vitsweep.extras.take_home"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    known = _known(cell)
    code = environment.get_template("train.py.j2").render(known)
    settings = [line for key, line in _settings(cell).items() if re.search(rf"\b{key}\b", code)]
    command = _command(cell, name)
    docstring = "\n".join([_title(cell), "", f"    {command}", "", *header]).rstrip()
    text = environment.get_template("file.py.j2").render(
        docstring=docstring,
        variables=[f"{k}={shlex.quote(v)}" for k, v in (cell.runtime.variables or {}).items()],
        code=code,
        settings="\n".join(settings),
        imports=_imports(code, known["own_imports"]),
    )
    return re.sub(r"\n{4,}", "\n\n\n", text).rstrip() + "\n"


def _title(cell: CellSpec) -> str:
    ranks = cell.resources.world_size
    return f"Train {cell.model.title} on {ranks} rank{'s' if ranks > 1 else ''}, in plain PyTorch."


def _command(cell: CellSpec, name: str) -> str:
    resources = cell.resources
    if cell.sharding.name == "none":
        return f"python {name}"
    nodes = f" --nnodes={resources.nodes}" if resources.nodes > 1 else ""
    return f"torchrun --nproc-per-node={resources.ranks_per_node}{nodes} {name}"


def _imports(code: str, own: Sequence[str]) -> list[list[str]]:
    """Return the lines of imports that the code needs: the standard library's, others, and the user's."""

    def used(names: Iterable[str]) -> list[str]:
        return [name for name in names if re.search(rf"\b{name}\b", code)]

    lines = {f"import {MODULES[name]}": MODULES[name] for name in used(MODULES)}
    named = {module: used(names.split()) for module, names in NAMES.items()}
    lines |= {_wrapped(module, names): module for module, names in named.items() if names}
    ordered = sorted(lines, key=lambda line: (line.startswith("from"), lines[line]))
    standard = [line for line in ordered if _root(lines[line]) in sys.stdlib_module_names]
    others = [line for line in ordered if line not in standard]
    return list(filter(None, [standard, others, _from(own)]))


def _from(paths: Sequence[str]) -> list[str]:
    """Return the lines that import functions by their paths, under names that the file has not."""
    names: dict[str, list[str]] = {}
    for path in sorted(paths):
        module, _, name = path.rpartition(".")
        names.setdefault(module, []).append(f"{name} as {_own(path)}")
    return [_wrapped(module, found) for module, found in names.items()]


def _own(path: str) -> str:
    return f"own_{path.rpartition('.')[2]}"


def _root(module: str) -> str:
    return re.split(r"[ .]", module)[0]


def _wrapped(origin: str, names: list[str]) -> str:
    line = f"from {origin} import {', '.join(names)}"
    if len(line) <= 88:
        return line
    return f"from {origin} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def _settings(cell: CellSpec) -> dict[str, str]:
    """Return constant -> the line that sets it."""
    model, batch, optimizer = cell.shape, cell.batch, cell.optimizer
    replicas = max(1, cell.mesh.data_parallel_size)
    found: dict[str, tuple[object, str]] = {
        "SEED": (cell.seed, ""),
        "IMAGES_PER_RANK": (
            cell.images_per_step // replicas,
            f"of one optimizer step: {cell.images_per_step} over all ranks",
        ),
        "ACCUMULATION_STEPS": (batch.accumulation_steps, "parts of these, one after another"),
        "IMAGE_SIDE": (batch.resolution_px, "pixels"),
        "CHANNELS": (model.in_channels, ""),
        "CLASSES": (model.num_classes, ""),
    }
    if isinstance(model, ViTSpec):
        found |= {
            "PATCH_SIDE": (model.patch_px, "pixels"),
            "DEPTH": (model.depth, "blocks"),
            "WIDTH": (model.width, "numbers per token"),
            "HEADS": (model.num_heads, ""),
            "MLP_WIDTH": (model.mlp_width, ""),
            "NORM_EPS": (model.norm_eps, ""),
        }
    found |= {
        "SHARDS": (cell.mesh.state_shards, "ranks that share one copy of the state"),
        "LEARNING_RATE": (optimizer.learning_rate, ""),
        "WEIGHT_DECAY": (optimizer.weight_decay, "of matrices"),
        "CLIP_NORM": (optimizer.clip_norm, "of all gradients together"),
        "STEPS": (100, "optimizer steps"),
    }
    return {k: f"{k} = {v}" + (f"  # {why}" if why else "") for k, (v, why) in found.items()}


def _known(cell: CellSpec) -> dict[str, Any]:
    """Return what the templates of model, parallelism and training are given."""
    plan, sharding = cell.precision.plan(), cell.sharding
    compilation: Any = cell.compilation
    arguments = getattr(compilation, "arguments", {})
    is_fsdp, on_cpu = sharding.shards_parameters, cell.resources.device == "cpu"
    separate, half = plan.norm_dtype != plan.param_dtype, plan.norm_dtype in HALF
    shards_are_masters = is_fsdp and plan.master_weights
    cast = None if shards_are_masters or plan.param_dtype == "float32" else plan.param_dtype
    norms = ("half on cpu" if on_cpu else None) if half else ("float32" if separate else None)
    model, own_loss = _model(cell), cell.loss_function
    is_vit = model["kind"] == "vit"
    masters = plan.master_weights and not is_fsdp
    norms_back, norm_units = bool(cast and separate), is_fsdp and separate
    return {
        "cell": cell,
        "plan": plan,
        "choice": sharding,
        "model": model,
        "own_imports": [path for path in (model["imported"], own_loss) if path],
        "own_loss": own_loss and _own(own_loss),
        "threads": cell.resources.threads_per_rank if on_cpu else None,
        "cast": cast,
        "cast_images": None if plan.param_dtype == "float32" else plan.param_dtype,
        "logits": "logits.float()" if plan.autocast_dtype or plan.param_dtype in HALF else "logits",
        "norms": norms,
        "norm": "LayerNorm" if norms else "nn.LayerNorm",
        "norms_back": norms_back,
        "norm_units": norm_units,
        "norm_list": norms_back or norm_units or bool(norms and not is_vit),
        "masters": masters,
        "scaler": _scaler(plan.loss_scale, cell, is_fsdp=is_fsdp),
        "constant_scale": plan.loss_scale if isinstance(plan.loss_scale, float) else "",
        "memory": _memory(cell),
        "kept": _kept(cell.memory.keep) if isinstance(cell.memory, RecomputeSelected) else [],
        "compile": None if compilation.scope == "nothing" else compilation.scope,
        "compile_arguments": ", ".join(
            f"{k}={v!r}".replace("'", '"') for k, v in arguments.items()
        ),
        "clip": cell.optimizer.clip_norm is not None,
        "optimizer": _built(cell.optimizer),
    } | _sharding(cell)


def _kept(kinds: Iterable[str]) -> list[str]:
    """Return the names of torch's operations whose results are kept."""
    names = {str(operation) for kind in kinds for operation in OPERATIONS[kind]}
    return sorted(name for name in names if name.startswith("aten.") and "_mm" not in name)


def _memory(cell: CellSpec) -> str | None:
    kinds = {"RecomputeBlocks": "blocks", "RecomputeSelected": "selected"}
    return kinds.get(type(cell.memory).__name__)


def _built(choice: Any) -> str:
    """Return the call that makes the optimizer."""
    given: dict[str, object] = {"lr": "LEARNING_RATE"}
    if isinstance(choice, AdamW):
        given |= {"betas": (choice.beta1, choice.beta2), "eps": choice.eps}
    else:
        given |= {"momentum": choice.momentum}
        given |= {"nesterov": True} if choice.nesterov else {}
    loop = choice.implementation == "loop"
    given |= {"foreach": False} if loop else {choice.implementation: True}
    lines = "".join(f"            {name}={value},\n" for name, value in given.items())
    name = "AdamW" if isinstance(choice, AdamW) else "SGD"
    return f"torch.optim.{name}(\n            groups,\n{lines}        )"


def _scaler(scale: object, cell: CellSpec, *, is_fsdp: bool) -> str | None:
    if scale is None:
        return None
    first = 2.0**16 if scale == "dynamic" else scale
    kind = "ShardedGradScaler" if is_fsdp else "GradScaler"
    return f'{kind}("{cell.resources.device}", init_scale={first})'


def _sharding(cell: CellSpec) -> dict[str, Any]:
    choice: Any = cell.sharding
    plan, is_fsdp = cell.precision.plan(), choice.shards_parameters
    kind = "fsdp" if is_fsdp else ("none" if choice.name == "none" else "ddp")
    reduced = getattr(choice, "gradient_dtype", None) or (
        "float32" if plan.master_weights else None
    )
    of_norms = {"reduce_dtype": reduced} if reduced else {}
    policy = ({"param_dtype": plan.param_dtype} if plan.master_weights else {}) | of_norms
    return {
        "sharding": kind,
        "hsdp": isinstance(choice, Hsdp),
        "policy": _policy("    policy = ", policy) + "\n",
        "norm_policy": _policy("", of_norms),
        "placement": is_fsdp and isinstance(cell.model, ModuleSpec),
        "unused": kind == "ddp" and cell.model.may_lack_gradients and not choice.static_graph,
    }


def _policy(start: str, given: Mapping[str, str]) -> str:
    named = [f"{name}=torch.{dtype}" for name, dtype in given.items()]
    line = f"{start}MixedPrecisionPolicy({', '.join(named)})"
    if len(line) <= 88:
        return line
    return f"{start}MixedPrecisionPolicy(\n        {', '.join(named)}\n    )"


BACKENDS = {
    "math": "SDPBackend.MATH",
    "flash": "SDPBackend.FLASH_ATTENTION",
    "efficient": "SDPBackend.EFFICIENT_ATTENTION",
    "cudnn": "SDPBackend.CUDNN_ATTENTION",
}


def _model(cell: CellSpec) -> dict[str, Any]:
    """Return what the templates say of the model."""
    model = cell.shape
    if isinstance(model, ModuleSpec):
        return _imported(model, cell.batch.resolution_px)
    assert isinstance(model, ViTSpec), "refused before"
    return {
        "kind": "vit",
        "class_token": model.has_class_token(cell.classifier.pooling),
        "batch_first": cell.layout.batch_first,
        "channels_last": cell.layout.channels_last,
        "linear": cell.layout.patch_embedding == "linear",
        "backend": BACKENDS.get(getattr(cell.attention, "backend", "")),
        "output": "",
        "imported": None,
        "has_complex": False,
    }


def _imported(spec: ModuleSpec, side: int) -> dict[str, Any]:
    given = {"num_classes": "CLASSES", "in_channels": "CHANNELS", "resolution_px": "IMAGE_SIDE"}
    shapes = {arg: given[shape] for arg, shape in spec.shape_arguments.items()}
    named = shapes | {name: _literal(spec, value) for name, value in spec.arguments.items()}
    module, own = without_weights(spec, side), None
    if spec.package == "timm":
        call = _call("timm.create_model", [f'"{spec.name}"', "pretrained=False"], named)
    elif spec.package == "transformers":
        call = _transformers(spec, module, named)
    else:
        assert spec.target is not None
        own = spec.target
        call = _call(f"model = {_own(own)}", [], named)
        frozen = [name for name, part in module.named_modules() if not part.training]
        for line in (
            "model.train()",
            *(f'model.get_submodule("{n}").training = False' for n in frozen),
        ):
            call += f"\n{line}"
        call += "\nreturn model"
    return {
        "kind": spec.package or "own",
        "build": call.splitlines(),
        "blocks": _blocks(module, spec),
        "output": _output(module, spec, side),
        "channels_last": False,
        "imported": own,
        "has_complex": any(t.is_complex() for t in [*module.parameters(), *module.buffers()]),
    }


def _transformers(spec: ModuleSpec, module: Any, named: Mapping[str, str]) -> str:
    source = "from_pretrained" if "/" in spec.name else "for_model"
    if isinstance(getattr(module.config, "image_size", None), (list, tuple)):
        sides = len(module.config.image_size)
        named = {**named, "image_size": f"[{', '.join(['IMAGE_SIDE'] * sides)}]"}
    config = _call(f"config = AutoConfig.{source}", [f'"{spec.name}"'], named)
    return f"{config}\nreturn AutoModelForImageClassification.from_config(config)"


def _call(function: str, first: list[str], named: Mapping[str, str]) -> str:
    start = "" if " = " in function else "return "
    given = [*first, *(f"{name}={value}" for name, value in named.items())]
    line = f"{start}{function}({', '.join(given)})"
    if len(line) <= 84:
        return line
    return f"{start}{function}(\n" + "".join(f"    {part},\n" for part in given) + ")"


def _literal(spec: ModuleSpec, value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_literal(spec, part) for part in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # in double quotes, as Python reads it too
    if not isinstance(value, (int, float, bool, type(None))):
        raise VitsweepError(
            f"`{spec.typed}` has an argument {pformat(value)}, which is no literal to write into a "
            "file: use `vitsweep.apply(cell, model)`."
        )
    return repr(value)


def _blocks(module: Any, spec: ModuleSpec) -> str:
    """Return the expression that lists the blocks of `model`."""
    from torch import nn

    blocks, lists = set(find_blocks(module, spec)), []
    for path, container in module.named_modules():
        if blocks and (children := set(container.children())) and children <= blocks:
            typed = re.sub(r"\.(\d+)", r"[\1]", f"model.{path}")
            iterates = isinstance(container, nn.ModuleList | nn.Sequential)
            lists.append(typed if iterates else f"{typed}.children()")
    return f"list({lists[0]})" if len(lists) == 1 else f"[{', '.join(f'*{one}' for one in lists)}]"


def _output(module: Any, spec: ModuleSpec, side: int) -> str:
    """Return what takes the logits out of what the model returns."""
    if spec.output is None:
        return ""
    if isinstance(spec.output, str) and spec.package != "transformers":
        import torch

        module._forward_hooks.clear()  # of `build_module`, which takes them out
        at = next(module.parameters()).device
        with torch.no_grad():
            returned = module(torch.zeros((2, *spec.input_shape(side)), device=at))
        return f'["{spec.output}"]' if isinstance(returned, Mapping) else f".{spec.output}"
    return f"[{spec.output}]" if isinstance(spec.output, int) else f".{spec.output}"
