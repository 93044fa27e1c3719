"""The private names of the package that tests outside ``tests/unit`` use: all of them, in one table.

Those tests know the product from outside: command lines, variables, exit codes, logs, uploads, files. What they need
besides goes through this table, so that a redesign has one file to look at. Lint refuses private names elsewhere
(pyproject.toml, ``banned-api``). Names are looked up when they are asked for: ranks import this, too.
"""

from __future__ import annotations

import importlib
from typing import Any

PRIVATE = {
    "CHECKPOINTS_RECORD": "checkpoint.places:POINTER",
    "agreement": "checkpoint.agreement",
    "group": "checkpoint.group",
    "points": "pod.staging.points",
    "saves": "checkpoint.saves",
    "Store": "checkpoint.store:Store",
    "store": "checkpoint.store",
    "CACHES": "config.caches:CACHES",
    "value_of": "config.quantities:value_of",
    "entrypoint": "pod.entrypoint",
    "command_line": "pod.command_line:command_line",
    "parse": "pod.command_line:parse",
    "patience": "store.patience",
    "Options": "pod.staging:Options",
    "POINTS": "pod.staging:POINTS",
    "stage": "pod.staging:stage",
    "verdict": "pod.verdict",
    "envvars": "envvars",
    "collective": "fs.collective",
    "ranks_met": "fs.store:ranks",
    "TorchStore": "fs.store:TorchStore",
    "Rules": "coordinator.rules:Rules",
    "Server": "coordinator.server:Server",
    "Link": "agent.link:Link",
    "MeetingPlace": "agent.meeting_place:MeetingPlace",
    "messages": "coordinator.messages",
    "policy": "agent.policy",
    "Endpoint": "topology:Endpoint",
    "SafeTask": "plugin.task:SafeTask",
    "context": "rank.context",
    "SAFE_IMPORT_ENVIRONMENT": "rank.fork:UNDER",
    "disk": "agent.disk",
    "ReservedPort": "coordinator.ports:ReservedPort",
    "run_record": "record.run",
    "main": "tools.cli:main",
    "doctor": "tools.doctor",
    "host_checks": "preflight.machine",
    "job_manifest": "tools.render:job_manifest",
    "template_of": "tools.render:template_of",
    "with_image_names": "tools.render:with_image_names",
    "summary": "tools.render:summary",
    "from_env": "topology:from_env",
}
"""Name to ``module:attribute``, or to the module that the name stands for; all below the package."""


def __getattr__(name: str) -> Any:
    if name not in PRIVATE:
        raise AttributeError(f"tests.harness.product names no {name!r}: add it to the table")
    module, _, attribute = PRIVATE[name].partition(":")
    found = importlib.import_module(f"flytekitplugins_safedist.{module}")
    return getattr(found, attribute) if attribute else found
