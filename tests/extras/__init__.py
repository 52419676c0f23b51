"""Tests of optional features; those of one whose folder was removed are skipped."""

import pytest

from vitsweep import extras

ABSENT_FOLDERS = tuple(f"extras/{name}/" for name in extras.KNOWN if name not in extras.FEATURES)
ABSENT = [feature for name, feature in extras.KNOWN.items() if name not in extras.FEATURES]
ABSENT_SETTINGS = tuple(
    [f"sweep.search={word}" for feature in ABSENT for word in feature.rounds]
    + [f"sweep.{key}=" for feature in ABSENT for key in feature.settings]
    + [option for feature in ABSENT for option in feature.options if "=" in option]
)
NEEDS_APPLY = pytest.mark.skipif(
    "apply" not in extras.NAMES, reason="`vitsweep.apply` is not there"
)
ABSENT_NAMES = {f"vitsweep.{name}" for feature in ABSENT for name in feature.names}
ABSENT_VERBS = {verb for feature in ABSENT for verb in feature.verbs}

WORDS = {
    "predict": ("keep_predictions", "predict_", "predicts", "StepTrace", "time_operators"),
    "compare": (
        "ComparisonRequest",
        "PairRounds",
        "PlannedPair",
        "StopReason",
        "compared_settings",
        "plan_pair",
    ),
    "explain": (
        "TracedRun",
        "explain",
        "explanations",
        "traced_pairs",
    ),
    "judge": ("judge_request", "JudgeRequest"),
    "gate": ("blocks_to_decide", "welch"),
    "take_home": ("asked_cell", "not_provable"),
    "guard": ("CheckResult", "slowness"),
    "tune": ("next_turn", "voted"),
    "bundle": ("bundle", "bundled", "reproduction"),
    "pareto": ("pareto_", "undominated"),
    "curves": ("mean_curve", "training_curves"),
    "mirror": ("check_tracker", "named_rows", "write_runs"),
    "latex": ("booktabs", "tex", "write_latex"),
    "published": ("PublishedTable", "SURENESS", "beside_cells", "beside_text", "with_published"),
    "limit": ("Searches", "limit_answer", "limit_names", "limits_text"),
    "reference": ("to_look_at",),
    "race": (
        "RACE",
        "RaceRounds",
        "can_race",
        "halving",
        "is_race",
        "race_",
        "racing",
        "read_race",
        "require_racing",
        "show_race",
        "within_reach",
    ),
}
"""Identifiers that no core file may define; one that ends in `_` stands for all that begin so."""
PAGES = {
    "predict": ("before_you_submit.md",),
    "compare": ("compare.md",),
    "gate": ("gate.md", "two_days.md"),
    "explain": ("explain.md",),
    "judge": ("judge.md",),
    "take_home": ("apply.md", "export.md"),
    "guard": ("guard.md",),
    "tune": ("tune.md",),
    "bundle": ("bundle.md",),
    "race": ("race.md",),
}
"""Pages of `docs/` of a feature."""
ABSENT_PAGES = {page for name in PAGES if name not in extras.FEATURES for page in PAGES[name]}
