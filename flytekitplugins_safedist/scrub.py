"""Secrets out of text that leaves a node: values of environment variables, credentials in addresses, known forms.

Errors and logs are the user's own and stay as they are; this is for the record of a run, which more people look at.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from urllib.parse import quote

_SHORTEST = 6
"""Characters of a value that is looked for: shorter ones are words and numbers."""

_SECRET = re.compile(r"key|token|secret|passw|credential|auth|cookie|session|private|signature|dsn", re.IGNORECASE)
_PUBLIC = re.compile(
    r"PATH|HOME|PWD|OLDPWD|LANG|LC_.*|TERM|SHELL|USER|LOGNAME|HOSTNAME|TMPDIR|TZ|_|SHLVL|PYTHON.*|VIRTUAL_ENV|"
    r"LD_LIBRARY_PATH|MASTER_ADDR|MASTER_PORT|.*WORLD_SIZE|.*RANK|GROUP_.*|PET_.*|JOB_COMPLETION_INDEX|SAFEDIST_.*|"
    r"FLYTE_INTERNAL_.*|KUBERNETES_.*|.*_SERVICE_(HOST|PORT)|.*_PORT|CUDA_.*|NVIDIA_.*|NCCL_.*|GLOO_.*|TORCH.*|"
    r"HOROVOD_.*|OMP_.*|MKL_.*|TRITON_.*|XDG_.*|(MY_)?(POD|NODE|HOST)_(NAME|NAMESPACE|IP|UID)"
)
"""Variables whose values are in every traceback or log, and no secrets: paths, places, addresses, names, sizes."""

_WORD = re.compile(r"[A-Za-z]+")
"""A value that is one word (``WARNING``, ``production``), and stands in many a text for itself."""

_SAME = re.compile(r"[ !#-&(-\[\]-~]*")
"""What Python and JSON write as it is: printable, without quotes and backslashes."""

_PLAIN = r"(?:-?[\d_.]{1,12}|none|null|true|false|yes|no|on|off)"
"""What no secret is: how many there are (``max_tokens=4096``), or the number of one."""

_NAMED = r"(?:secret|passw(?:or)?d|passphrase|\bpwd|(?:api|access|account|shared)[-_]?key|client[-_]?secret)"
_VALUE = r"(?:(?:[\w.]*[(\[{]|[bru]{1,2})?(?:'[^']*'|\"[^\"]*\")|[^\s,;'\"]+)"
"""As it stands behind a name: in quotes, also those of bytes, of a call and of the first of several; or a word."""
_SCHEME = r"(?:basic|token|apikey|api-key)"
_IN_QUERY = r"(?:sig|signature|key|passw|credential|auth|token|secret)"
_UNLESS = rf"(?!{_PLAIN}(?=[\s,;:)\]}}'\"]|\Z))"

# One line for each kind of token, as those who issue them document it, and as gitleaks and detect-secrets look for it.
_TOKENS = (
    r"\b(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}\b",  # AWS
    r"\b(?:gh[pousr]_|github_pat_)\w{16,}",  # GitHub
    r"\bgl(?:pat|dt|rt|cbt|ptt|ft|soat)-[\w-]{16,}",  # GitLab
    r"\bhf_\w{16,}",  # Hugging Face
    r"\b(?:sk|pk|rk)[-_][\w-]{16,}",  # OpenAI, Anthropic, Stripe
    r"\bxox[a-z]-[\w-]{10,}",  # Slack, and
    r"(?<=hooks\.slack\.com/services/)[\w/]+",  # its hooks
    r"\bAIza[\w-]{35}",  # Google, and
    r"\bya29\.[\w-]{16,}",  # its OAuth
    r"\b(?:npm_|dapi|r8_|nvapi-|lin_api_|hvs\.|dop_v1_|pypi-|SG\.|NRAK-|glsa_|shpat_|dckr_pat_)[\w.-]{16,}",  # others
    r"\beyJ[\w-]{8,4000}\.eyJ[\w-]{8,}(?:\.[\w-]*)?",  # a JSON web token
    r"\bAGE-SECRET-KEY-1[0-9A-Z]{16,}",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
)

# A name is looked at once, from its first character: where each character of a long text may be the first of a name,
# the time that this takes grows with the square of its length, before the verdict is uploaded.
_FORMS = [
    (re.compile(form, re.IGNORECASE | re.DOTALL), instead)
    for form, instead in (
        (r"(?<=://)(?:[^/\s'\"]+|[^\s'\"/:@]{1,64}:(?!\d{1,5}[/\s])[^\s'\"@]{1,128})@", "[credentials]@"),
        (rf"([?&](?=[\w.-]*?{_IN_QUERY})[\w.-]+=)[^&\s'\"]+", r"\1[secret]"),
        *(
            (
                rf"((?<![\w.-])(?=[\w.-]*?{named})[\w.-]+['\"]?\s*[=:]\s*){unless}{_VALUE}",
                r"\1[secret]",
            )
            for named, unless in ((_NAMED, ""), ("token(?!i[sz])", _UNLESS))
        ),
        (rf"((?<!\S)--?(?=[\w.-]*?(?:{_NAMED}|token))[\w.-]+ ){_UNLESS}(?!-)[^\s'\"]+", r"\1[secret]"),
        (rf"(\b(?:bearer|authorization['\"]?\s*[=:]\s*['\"]?{_SCHEME})\s+)[\w.~+/=-]{{8,}}", r"\1[secret]"),
    )
] + [(re.compile(form, re.DOTALL), "[secret]") for form in _TOKENS]


def scrubber(environment: Mapping[str, str]) -> Callable[[str], str]:
    """What takes secrets out of a text.

    Args:
        environment: variables whose values must not show, but for those that are public by their name, and for plain
            words. In the place of a value stands the name of its variable; where that does not say that it is secret,
            of whole words alone.
    """
    names: dict[str, str] = {}
    for name, value in environment.items():
        if _SECRET.search(name) is None and _PUBLIC.fullmatch(name):
            continue
        if _WORD.fullmatch(value) and (_SECRET.search(name) is None or re.fullmatch(_PLAIN, value, re.IGNORECASE)):
            continue
        for part in _written(value):
            if len(part.strip()) >= _SHORTEST or (len(part) >= 4 and _SECRET.search(name)):
                names[part] = name
    # The longest first: one value may be a part of another.
    parts = sorted(names, key=len, reverse=True)

    def scrub(text: str) -> str:
        there = [part for part in parts if part in text]
        if there:
            known = "|".join(map(_pattern, there, map(names.__getitem__, there)))
            text = re.sub(known, lambda found: f"[${names[found[0]]}]", text)
        for form, instead in _FORMS:
            text = form.sub(instead, text)
        return text

    return scrub


def _written(value: str) -> set[str]:
    """A value as it may stand in a text: as it is or its lines, in Python's words, in JSON, and in an address."""
    data = os.fsencode(value)
    quoted = quote(data, safe="")
    told = {value, value.strip(), *value.splitlines(), quoted, quoted.replace("%2F", "/"), quoted.replace("%20", "+")}
    if _SAME.fullmatch(value):  # there may be thousands
        return told
    as_json = {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    return told | as_json | {repr(value)[1:-1], repr(data)[2:-1]}


def _pattern(part: str, name: str) -> str:
    return re.escape(part) if _SECRET.search(name) else rf"(?<!\w){re.escape(part)}(?!\w)"
