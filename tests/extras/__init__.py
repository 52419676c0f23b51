"""Tests of optional features; those of one whose folder was removed are skipped."""
