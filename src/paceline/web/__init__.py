"""The live page of runs: a server for one user, and what it reads from run folders."""
