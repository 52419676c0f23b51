"""Published figures of a source, next to what a sweep measured."""
