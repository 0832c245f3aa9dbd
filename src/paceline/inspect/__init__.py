"""Findings: what makes a run slow or wasteful, in words, from its files.

    facts = read_facts(RunFolder(path))
    result = find(facts)
    result.findings, result.unchecked

Reads the files of a run or a recording of samples; it imports no torch and runs no code of the task.
"""
