"""What these tests need: a GPU. ``make gpu`` fails without one; else they are left out, in one line."""

from __future__ import annotations

import pytest

from tests.harness import needs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True, scope="session")
def _a_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        needs.missing("no GPU", required="SAFEDIST_TEST_GPU")
