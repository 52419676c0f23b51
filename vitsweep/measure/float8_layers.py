"""Which layers multiply in float8, for the record."""

import re
from collections import Counter

from torch import nn

from vitsweep.model.parameter_names import plain_name


def converted_layers(model: nn.Module) -> str | None:
    """Return the names of the linears that multiply in float8, blocks counted together; None for none."""
    names = [
        name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"
    ]
    found = Counter(re.sub(r"^(.*?blocks)\.\d+\.", r"\1.*.", plain_name(name)) for name in names)
    return ", ".join(f"{count} x {name}" for name, count in found.items()) or None
