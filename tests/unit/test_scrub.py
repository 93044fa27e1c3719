"""Secrets do not pass, and words do."""

from __future__ import annotations

import pytest

from flytekitplugins_safedist.scrub import scrubber
from flytekitplugins_safedist.store.errors import one_line
from flytekitplugins_safedist.texts import public

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
        ("/site-packages/correct horse_lightning/x", "/site-packages/correct horse_lightning/x"),
        ("num_tokens=4097 exceeds max_tokens=4096 (pad_token_id: 0)",) * 2,
        ("eos_token=None, token=12345678901234, token: 0f0f", "eos_token=None, token=[secret], token: [secret]"),
        ("password=1234", "password=[secret]"),
        ("glpat-0123456789ABCDEFGHIJ, eyJhbGciOiJI.eyJzdWIiOiIx.sig-1", "[secret], [secret]"),
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


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("s3://me:pass@host/a?X-Signature=0f", "s3://host/a?..."),
        ("http://me:pass@[::1/x?sig=0f", "http://[::1/x?..."),
        ("zip://a::https://me:pass@host/b.zip?sig=0f", "zip://a::https://host/b.zip?..."),
        ("/a", "/a"),
    ],
)
def test_an_address_shows_neither_password_nor_signature_whatever_is_wrong_with_it(uri: str, shown: str) -> None:
    assert public(uri) == shown
