import pytest

pytest.importorskip("vitsweep.extras.pareto")
