"""Clients of stores as staging needs them: credentials as flytekit has them, patience and retries ours."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

CONNECT_SECONDS = 10.0
READ_TIMEOUT_SECONDS = 20.0
"""Until a connection stands, and without a byte on it. Healthy stores need fractions of a second for both."""


def filesystem(uri: str, shown: str, *, anonymous: bool) -> Any:
    """The fsspec file system for ``uri``, with the credentials flytekit is configured with.

    Every try is one try: s3fs repeats each five times by default, and botocore each of those five times again.

    Args:
        shown: the address for messages.

    Raises:
        ValueError, ImportError: nothing installed here reaches such a store.
    """
    from flytekit.core.context_manager import FlyteContextManager
    from fsspec.utils import get_protocol

    access = FlyteContextManager.current_context().file_access
    kwargs: dict[str, Any] = {"anonymous": True} if anonymous else {}
    protocol = get_protocol(uri)
    with suppress(KeyError):
        found = access.get_filesystem(protocol, path=uri, **kwargs)
        changes = _of_our_own(protocol, found.storage_options)
        if not changes:
            return found
        # A client apart from the one that the task will use: its patience is not ours.
        ours = type(found)(**{**found.storage_options, **changes})
        if protocol in ("s3", "s3a"):
            ours.retries = 1
        return ours
    raise ValueError(f"no file system for {shown}")


def _of_our_own(protocol: str, options: Mapping[str, Any]) -> dict[str, Any]:
    if protocol in ("s3", "s3a"):
        config = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_TIMEOUT_SECONDS,
            "retries": {"mode": "standard", "total_max_attempts": 1},
        }
        return {"config_kwargs": {**options.get("config_kwargs", {}), **config}}
    if protocol in ("http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_TIMEOUT_SECONDS)
        client = dict(options.get("client_kwargs", {}))
        # The bytes as they are stored: what a server calls Content-Encoding is the archive's own packing to us.
        client["headers"] = {**client.get("headers", {}), "Accept-Encoding": "identity"}
        return {"client_kwargs": {**client, "timeout": timeout, "auto_decompress": False}}
    return {}
