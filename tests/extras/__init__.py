"""Tests of optional features; those of one whose folder was removed are skipped."""

from vitsweep import extras

ABSENT_FOLDERS = tuple(f"extras/{name}/" for name in extras.KNOWN if name not in extras.FEATURES)
ABSENT = [feature for name, feature in extras.KNOWN.items() if name not in extras.FEATURES]
ABSENT_SETTINGS = tuple(
    [f"sweep.search={word}" for feature in ABSENT for word in feature.rounds]
    + [f"sweep.{key}=" for feature in ABSENT for key in feature.settings]
)
ABSENT_VERBS = {verb.name for feature in ABSENT for verb in feature.verbs}
ABSENT_PAGES = {page for feature in ABSENT for page in feature.pages}
