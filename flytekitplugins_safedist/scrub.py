"""Secrets out of text that leaves a node: values of environment variables, credentials in addresses, known forms.

Errors and logs are the user's own and stay as they are; this is for the record of a run, which more people look at.
"""

from __future__ import annotations

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
    r"HOROVOD_.*|OMP_.*|MKL_.*|TRITON_.*|XDG_.*"
)
"""Variables whose values are in every traceback or log, and no secrets: paths, places, addresses, sizes."""

_NAMED = r"(?:secret|passw(?:or)?d|api_?key|access_?key)"
_PLAIN = r"(?:-?[\d_.]{1,12}|none|null|true|false)(?=[\s,;:)\]}'\"]|\Z)"
"""What no token is: how many there are (``max_tokens=4096``), or the number of one."""
_IN_QUERY = r"(?:sig|signature|key|passw|credential|auth|token|secret)"
# A name is looked at once, from its first character: where each character of a long text may be the first of a name,
# the time that this takes grows with the square of its length, before the verdict is uploaded.
_FORMS = [
    (re.compile(form, re.IGNORECASE | re.DOTALL), instead)
    for form, instead in (
        (r"(?<=://)[^/\s'\"]+@", "[credentials]@"),
        (rf"([?&](?=[\w.-]*?{_IN_QUERY})[\w.-]+=)[^&\s'\"]+", r"\1[secret]"),
        *(
            (
                rf"((?<![\w.-])(?=[\w.-]*?{named})[\w.-]+['\"]?\s*[=:]\s*){unless}(?:'[^']*'|\"[^\"]*\"|[^\s,;'\"]+)",
                r"\1[secret]",
            )
            for named, unless in ((_NAMED, ""), ("token", f"(?!{_PLAIN})"))
        ),
        (r"(\b(?:bearer|authorization['\"]?\s*[=:]\s*['\"]?basic)\s+)[\w.~+/=-]{8,}", r"\1[secret]"),
        (r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\b(?:gh[pousr]_|hf_|sk-|xox[a-z]-|glpat-)[\w-]{16,}", "[secret]"),
        (r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]*)?", "[secret]"),  # a JSON web token
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", "[secret]"),
    )
]


def scrubber(environment: Mapping[str, str]) -> Callable[[str], str]:
    """What takes secrets out of a text.

    Args:
        environment: variables whose values must not show, but for those that are public by their name. In the place of
            a value stands the name of its variable; where that does not say that it is secret, of whole words alone.
    """
    names: dict[str, str] = {}
    for name, value in environment.items():
        if _SECRET.search(name) is None and _PUBLIC.fullmatch(name):
            continue
        for part in {value, value.strip(), *value.splitlines(), repr(value)[1:-1], quote(os.fsencode(value), safe="")}:
            if len(part.strip()) >= _SHORTEST or (len(part) >= 4 and _SECRET.search(name)):
                names[part] = name
    # The longest first: one value may be a part of another.
    known = re.compile(
        "|".join(
            re.escape(part) if _SECRET.search(names[part]) else rf"(?<!\w){re.escape(part)}(?!\w)"
            for part in sorted(names, key=len, reverse=True)
        )
        or r"(?!)"
    )

    def scrub(text: str) -> str:
        text = known.sub(lambda found: f"[${names[found[0]]}]", text)
        for form, instead in _FORMS:
            text = form.sub(instead, text)
        return text

    return scrub
