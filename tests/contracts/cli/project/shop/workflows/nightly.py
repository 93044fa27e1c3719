from flytekit import workflow

from ..training import prepare, train


@workflow
def nightly(size: int) -> float:
    return train(size=prepare(size=size))
