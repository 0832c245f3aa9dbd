import pytest

from harness import ranks


@pytest.fixture(scope="session", autouse=True)
def _end_ranks():
    yield
    for size in range(1, 9):
        ranks(size).end()
