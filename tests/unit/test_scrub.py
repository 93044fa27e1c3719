"""Secrets do not pass, and words do."""

from __future__ import annotations

import json
from collections.abc import Callable
from urllib.parse import quote

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


SECRET = {
    "it is correct horse.": "it is [$PLANTED].",
    "/site-packages/correct horse_lightning/x": "/site-packages/correct horse_lightning/x",
    "eos_token=None, token=12345678901234, token: 0f0f": "eos_token=None, token=[secret], token: [secret]",
    "password=1234": "password=[secret]",
    "it is correct horse battery.": "it is [$LONGER].",
    "abcd": "[$MY_TOKEN]",
    "of-ours-but-a-key": "[$SAFEDIST_KEY]",
    '  "private": "line-of-a-key"': "[$ACCOUNT]",
    "/usr/bin:/bin, rank 12345678, 1 of 2": "/usr/bin:/bin, rank 12345678, 1 of 2",
    "postgres://me:pass@db:5432/x": "postgres://[credentials]@db:5432/x",
    "redis://:p@ss@cache:6379": "redis://[credentials]@cache:6379",
    "GET /?q=correct%20horse": "GET /?q=[$PLANTED]",
    "Authorization: Basic bWU6aHVudGVyMg==": "Authorization: Basic [secret]",
    "https://s3/x?a=1&X-Amz-Signature=0f0f&b=2": "https://s3/x?a=1&X-Amz-Signature=[secret]&b=2",
    "password=hunter2, user=me": "password=[secret], user=me",
    "{'api_key': 'k-1 2', 'n': 3}": "{'api_key': [secret], 'n': 3}",
    "--my.access-key-tokens: abc": "--my.access-key-tokens: [secret]",
    "url=password=abc": "url=password=[secret]",
    "Authorization: Bearer eyJhbGciOi.xyz": "Authorization: Bearer [secret]",
    "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----": "[secret]",
    "x-api-key: 0f0f0f": "x-api-key: [secret]",
    "api-key: 0f0f0f": "api-key: [secret]",
    "AccountName=me;AccountKey=0f0f==;Suffix": "AccountName=me;AccountKey=[secret];Suffix",
    "aws_secret_access_key = 0f0f": "aws_secret_access_key = [secret]",
    "client-secret: 'a b'": "client-secret: [secret]",
    "pwd=hunter2": "pwd=[secret]",
    "train.py --password hunter2 --lr 0.1": "train.py --password [secret] --lr 0.1",
    "--hf-token abc --steps 5": "--hf-token [secret] --steps 5",
    "postgres://u:pa/ss@db:5432/x": "postgres://[credentials]@db:5432/x",
    "https://hooks.slack.com/services/T0/B0/XX": "https://hooks.slack.com/services/[secret]",
    "SharedAccessSignature sv=1&sig=abc%3D": "SharedAccessSignature sv=1&sig=[secret]",
    "{'password': b'hunter2', 'n': 3}": "{'password': [secret], 'n': 3}",
    "login(api_key=Secret('hunter2'))": "login(api_key=[secret]))",
    "api_keys=['hunter2']": "api_keys=[secret]]",
    'connect("host=x password=hunter2", "y")': 'connect("host=x password=[secret]", "y")',
    "passphrase=hunter2": "passphrase=[secret]",
    "{'Authorization': 'Token 0f0f0f0f'}": "{'Authorization': 'Token [secret]'}",
}


def test_what_is_secret_is_taken_out() -> None:
    scrub = scrubber(ENVIRONMENT)
    assert {text: scrub(text) for text in SECRET} == SECRET


PART = "A1b2C3d4E5f6G7h8I9j0"
"""Of a made-up token; put together here, so that nobody's scanner takes this file for a leak."""

TOKENS = [
    "AK" + "IAIOSFODNN7EXAMPLE",
    "AS" + "IAIOSFODNN7EXAMPLE",
    "gh" + f"p_{PART}{PART[:16]}",
    "gh" + f"s_{PART}{PART[:16]}",
    "github" + f"_pat_{PART}_{PART}",
    "gl" + f"pat-{PART}",
    "gl" + f"dt-{PART}",
    "h" + f"f_{PART}{PART[:14]}",
    "s" + f"k-{PART}{PART}",
    "s" + f"k-ant-api03-{PART}-{PART}",
    "s" + f"k-proj-{PART}",
    "s" + f"k_live_{PART}",
    "r" + f"k_live_{PART}",
    "xo" + f"xb-123456789012-{PART}",
    "AI" + f"zaSy{PART}{PART[:13]}",
    "ya" + f"29.{PART}",
    "n" + f"pm_{PART}{PART[:16]}",
    "dap" + f"i{PART}{PART[:12]}",
    "r" + f"8_{PART}{PART[:17]}",
    "nv" + f"api-{PART}",
    "hv" + f"s.{PART}",
    "do" + f"p_v1_{PART}{PART}",
    "pyp" + f"i-{PART}{PART}",
    "S" + f"G.{PART}.{PART}",
    "gl" + f"sa_{PART}_0f0f0f0f",
    "shp" + f"at_{PART}",
    "dckr" + f"_pat_{PART}",
    "lin" + f"_api_{PART}",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "AGE-SECRET" + f"-KEY-1{PART.upper()}{PART.upper()}",
]


def test_a_token_of_a_known_form_goes_wherever_it_stands() -> None:
    scrub = scrubber({})
    assert [token for token in TOKENS if scrub(f"refused: {token}, 401") != "refused: [secret], 401"] == []


WORDS = {
    "TOKENIZERS_PARALLELISM": "false",
    "LOG_LEVEL": "WARNING",
    "APP_ENV": "production",
    "MODE": "training",
    "POD_NAME": "train-abc-n0-worker-0",
    "MY_NODE_NAME": "gpu-node-17",
    "CONDA_DEFAULT_ENV": "pytorch",
}
HARMLESS = [
    "expected false, got true",
    "WARNING: loss is nan at step 12",
    "not for production use",
    "training step on train-abc-n0-worker-0",
    "gpu-node-17 was lost",
    "/site-packages/pytorch_lightning/trainer.py",
    "num_tokens=4097 exceeds max_tokens=4096",
    "pad_token_id: 0, eos_token=None",
    "RuntimeError: shape '[2, 3]' is invalid for input of size 5",
    "https://host:8080/path@v2/x",
    "s3://bucket/data/part-0000.parquet",
    "file:///tmp/run/model.pt",
    "git@github.com:org/repo.git",
    "a key, a secret, a password",
    "KeyError: 'label'",
    "state_dict keys: ['layer.0.weight', 'layer.0.bias']",
    "missing key(s) in state_dict: head.weight",
    "sk-learn and scikit-learn",
    "hf_hub_download failed",
    "layer.1.attention.key.weight",
    "commit 374f15f0c0ffee374f15f0c0ffee374f15f0c0ff",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "uuid 123e4567-e89b-12d3-a456-426614174000",
    "torch.nn.MultiheadAttention(key_padding_mask)",
    "--tokens 4096 --steps 5",
    "tokenizer: bert-base-uncased",
    "a basic authorization of bearers",
    "password",
    "loss=0.25, lr=1e-4, tokens/s=1234.5",
    "asked for sk_test in the docs",
]


def test_what_is_no_secret_stays() -> None:
    scrub = scrubber(WORDS)
    assert [scrub(text) for text in HARMLESS] == HARMLESS


@pytest.mark.parametrize(
    "written",
    [repr, json.dumps, lambda value: json.dumps(value, ensure_ascii=False), lambda value: repr(value.encode()), quote],
    ids=["repr", "JSON in ASCII", "JSON", "bytes", "a path"],
)
def test_a_value_is_taken_out_however_it_is_written(written: Callable[[str], str]) -> None:
    value = '{"user": "zoë", "key": "a/b\\n"}'
    shown = scrubber({"ACCOUNT": value})(f"x {written(value)}.")
    assert shown.strip("bx '\".") == "[$ACCOUNT]"


def test_thousands_of_variables_cost_no_more_than_their_look() -> None:
    environment = {f"SVC{number}_PORT_80_TCP": f"tcp://10.0.{number}.7:80" for number in range(1800)}
    text = 'File "/site-packages/torch/x.py", line 33, at tcp://10.0.17.7:80\n' * 3000
    assert scrubber(environment)(text).count("[$SVC17_PORT_80_TCP]") == 3000


LONG = 300_000
"""Characters. Where the time grows with their square, an hour; else less than a second."""


@pytest.mark.parametrize(
    "repeated", ["a.", "a", "a-b_", "layer.1.weight-", "token", "?sig", "&a=", "bearer ", "x://", "@", "eyJaaaaaaaa-"]
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
