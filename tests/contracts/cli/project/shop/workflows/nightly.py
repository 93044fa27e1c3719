from flytekit import workflow

from ..training import legacy, prepare


@workflow
def nightly(size: int) -> float:
    return legacy(size=prepare(size=size))
