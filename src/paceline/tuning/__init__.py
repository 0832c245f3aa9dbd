"""paceline tune: search hyper-parameters and architectures; each trial is a run folder of its own.

space → samplers → controller (scheduler, executor) → journal → results. The journal of a study is the only
state: the sampler is rebuilt from it for each suggestion, so that a study continues after any interruption.
"""
