"""A model of the user's: any factory of an `nn.Module`, and what is refused with it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vitsweep.model.module_factory import ModuleFactory
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.from_yaml import wrong_target

OF_TRANSFORMERS: Mapping[str, tuple[str, str]] = {
    "classifier": ("token", "chooses among tokens"),
    "attention": ("sdpa_auto", "computes attention"),
    "vit_block": ("plain", "rearranges the branches of transformer blocks"),
    "tokens": ("all", "drops or adds tokens"),
    "sequence_parallel": ("none", "shares tokens among ranks"),
    "tensor_parallel": ("none", "splits heads and MLPs"),
    "pipeline_parallel": ("none", "deals out transformer blocks"),
}
"""Group -> its default choice, which does nothing here, and what all others do."""
IN_SEAM = "`sdpa_math`, `sdpa_flash`, `sdpa_efficient` or `sdpa_cudnn_first`"
"""Choices of `attention` of which `replaces_attend_alone` holds, but for the default one."""


@dataclass(frozen=True, kw_only=True)
class ModuleSpec(ModuleFactory):
    """Any module of the user's as the model of a cell; its settings are those of `ModuleFactory`."""

    def refused(self, cell: "CellSpec") -> dict[str, str]:
        """Refuse what needs the inside of a module to be known."""
        reasons = {
            group: f"`{group}={getattr(cell, group).name}` {why}, and of `{self.typed}` vitsweep knows "
            f"the blocks alone: use `{group}={plain}`."
            for group, (plain, why) in OF_TRANSFORMERS.items()
            if getattr(cell, group).needs_transformer
        }
        if "attention" in reasons:
            said = reasons.pop("attention").removesuffix(".")
            if not cell.attention.replaces_attend_alone:
                known = f", or {IN_SEAM}, which can replace `self.attend`" if self.seams else ""
                reasons["attention"] = f"{said}{known}."
            elif "attend" not in self.seams:
                reasons["attention"] = (
                    f"{said}, or let its attention modules call `self.attend(q, k, v)` and say so with "
                    "`model.seams=[attend]`."
                )
        if not cell.layout.batch_first or cell.layout.channels_last:
            reasons["layout"] = (
                f"`layout={cell.layout.name}` orders axes inside the model, and `{self.typed}` has an "
                "order of its own: use `layout=batch_first` with `layout.channels_last=false`."
            )
        if cell.precision.float8:
            reasons["precision"] = (
                f"`precision={cell.precision.name}` swaps linears of vitsweep's own blocks: use "
                "`precision=O1` or `precision=bf16`."
            )
        return reasons

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Import and build the module, without memory for its weights, and say what is wrong with it."""
        yield from super().conflicts(cell)
        if wrong := wrong_target("model", self.name, self.target, "an `nn.Module`"):
            yield wrong
        elif self.passes_name and self.name == self.package:
            yield f"`model={self.package}` needs `model.name=...`, such as {EXAMPLES[self.package]}."
        else:
            from vitsweep.model.user_module import problems, technique_problems

            fits = not any(cell.data.shape_faults(cell))  # else the model would be blamed
            yield from problems(self, cell, run=fits)
            if fits:
                yield from technique_problems(self, cell)


EXAMPLES: Mapping[str, str] = {
    "timm": "`vit_tiny_patch16_224`",
    "transformers": "`vit`, a type of model, or `google/vit-base-patch16-224`, a configuration on the hub",
}
