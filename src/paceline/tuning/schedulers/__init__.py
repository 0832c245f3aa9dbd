"""Schedulers: how long each trial trains, and which trial trains next, as functions of the journal."""
