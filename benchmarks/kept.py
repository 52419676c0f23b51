"""Result files: what was measured, with the machine and the date beside it."""

import json
import os
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def keep(name: str, figures: dict[str, Any], folder: Path = RESULTS, device: str = "cpu") -> Path:
    """Write `<name>-<device>-<date>.json` and say where it is."""
    import torch

    from vitsweep.measure.environment import environment

    facts = environment(torch.device(device))
    machine = "-".join(facts["device"].replace("(R)", "").replace("@", "").split())
    kept = {
        "date": date.today().isoformat(),
        "environment": facts,
        "cores": os.cpu_count(),
        "load_at_the_end": round(os.getloadavg()[0], 2),
        **figures,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{machine}-{date.today()}.json"
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"-> {path}")
    return path
