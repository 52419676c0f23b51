"""Tests of optional features; those of one whose folder was removed are skipped."""

from vitsweep import extras

ABSENT = [feature for name, feature in extras.KNOWN.items() if name not in extras.FEATURES]
ABSENT_VERBS = {verb.name for feature in ABSENT for verb in feature.verbs}
ABSENT_PAGES = {page for feature in ABSENT for page in feature.pages}
