from flytekit import workflow

from ..training import evaluate, prepare, train


@workflow
def daily(size: int = 4) -> float:
    return evaluate(score=train(size=prepare(size=size)))
