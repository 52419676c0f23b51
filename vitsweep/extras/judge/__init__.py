"""Judging a change of code: two states of it trained in turns, proved equal, timed from outside."""
