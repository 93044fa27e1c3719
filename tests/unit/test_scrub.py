"""Secrets do not pass, and words do."""

from __future__ import annotations

import pytest

from flytekitplugins_safedist.flyte.storage_errors import one_line
from flytekitplugins_safedist.scrub import scrubber

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "RANK": "12345678",
    "PLANTED": "correct horse",
    "MY_TOKEN": "abcd",
    "SAFEDIST_KEY": "of-ours-but-a-key",
    "LONGER": "correct horse battery",
    "ACCOUNT": '{\n  "private": "line-of-a-key"\n}',
    "SMALL": "1",
}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("it is correct horse.", "it is [$PLANTED]."),
        ("it is correct horse battery.", "it is [$LONGER]."),
        ("abcd", "[$MY_TOKEN]"),
        ("of-ours-but-a-key", "[$SAFEDIST_KEY]"),
        ('  "private": "line-of-a-key"', "[$ACCOUNT]"),
        ("/usr/bin:/bin, rank 12345678, 1 of 2", "/usr/bin:/bin, rank 12345678, 1 of 2"),
        ("postgres://me:pass@db:5432/x", "postgres://[credentials]@db:5432/x"),
        ("redis://:p@ss@cache:6379", "redis://[credentials]@cache:6379"),
        ("GET /?q=correct%20horse", "GET /?q=[$PLANTED]"),
        ("Authorization: Basic bWU6aHVudGVyMg==", "Authorization: Basic [secret]"),
        ("a basic operation of bearers", "a basic operation of bearers"),
        ("https://s3/x?a=1&X-Amz-Signature=0f0f&b=2", "https://s3/x?a=1&X-Amz-Signature=[secret]&b=2"),
        ("password=hunter2, user=me", "password=[secret], user=me"),
        ("{'api_key': 'k-1 2', 'n': 3}", "{'api_key': [secret], 'n': 3}"),
        ("--my.access-key-tokens: abc", "--my.access-key-tokens: [secret]"),
        ("url=password=abc", "url=password=[secret]"),
        ("a token, a secret", "a token, a secret"),
        ("Authorization: Bearer eyJhbGciOi.xyz", "Authorization: Bearer [secret]"),
        ("AKIAABCDEFGHIJKLMNOP", "[secret]"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", "[secret]"),
        ('File "/root/train.py", line 3, in load', 'File "/root/train.py", line 3, in load'),
    ],
)
def test_what_is_secret_is_taken_out(text: str, shown: str) -> None:
    assert scrubber(ENVIRONMENT)(text) == shown


LONG = 300_000
"""Characters. Where the time grows with their square, an hour; else less than a second."""


@pytest.mark.parametrize(
    "repeated", ["a.", "a", "a-b_", "layer.1.weight-", "token", "?sig", "&a=", "bearer ", "x://", "@"]
)
def test_a_long_text_takes_no_longer_than_its_length(repeated: str) -> None:
    text = repeated * (LONG // len(repeated))
    assert scrubber({})(f"{text} password=hunter2").endswith("[secret]")
    assert one_line(ValueError(text)).endswith("...")


def test_without_variables_nothing_of_a_text_is_a_value() -> None:
    assert scrubber({})("any text at all") == "any text at all"
