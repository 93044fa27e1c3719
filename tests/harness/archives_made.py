"""Archives for property tests: ordinary ones as tar programs write them, and what damage and forgery make of them."""

from __future__ import annotations

import os
import tarfile

from hypothesis import strategies as st

from tests.harness.tarballs import directory, hardlink, member, symlink, tar

# Names of every kind that Linux allows: spaces, newlines, quotes, dashes, other scripts, bytes that are not UTF-8.
NAME = st.one_of(
    st.sampled_from(
        [
            "a",
            "b",
            "pkg",
            "__init__.py",
            "-rf",
            " x ",
            "new\nline",
            "'q'",
            "caf\u00e9",
            "cafe\u0301",
            "\u6a21\u578b",
            "..x",
            "x.",
        ]
    ),
    st.text(st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",)), min_size=1, max_size=8).filter(
        lambda name: name not in (".", "..")
    ),
    st.integers(95, 120).map(lambda length: "n" * length),
    st.just(b"\xff\xfe-latin".decode("utf-8", "surrogateescape")),
)
PATH = st.lists(NAME, min_size=1, max_size=4).map("/".join).filter(lambda path: len(os.fsencode(path)) < 700)
MODE = st.sampled_from([0o644, 0o600, 0o755, 0o444, 0o640, 0o777])
DATA = st.one_of(st.binary(max_size=40), st.sampled_from([b"", b"x" * 511, b"x" * 512, b"x" * 513, b"y" * 70_000]))
ITEM = st.one_of(
    st.tuples(st.just("file"), PATH, MODE, DATA),
    st.tuples(st.just("directory"), PATH, st.sampled_from([0o755, 0o700, 0o555]), st.just(b"")),
    st.tuples(st.just("symlink"), PATH, st.just(0), st.just(b"")),
    st.tuples(st.just("hardlink"), PATH, st.just(0), st.just(b"")),
)
FORMATS = {"pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT}


def ordinary(items) -> list[tuple[tarfile.TarInfo, bytes]]:
    """Members that a tar program could have written from one real directory, in an order it could have used."""
    members, kinds = [], {}
    for kind, path, mode, data in items:
        parents = [path[:at] for at, letter in enumerate(path) if letter == "/"]
        if path in kinds or any(kinds.get(parent, "directory") != "directory" for parent in parents):
            continue
        if kind == "hardlink":
            files = [name for name, other in kinds.items() if other == "file"]
            if not files:
                continue
            members.append(hardlink(path, files[-1]))
        elif kind == "symlink":
            members.append(symlink(path, "../" * path.count("/") + (next(iter(kinds), "nowhere"))))
        elif kind == "directory":
            members.append(directory(path, mode))
        else:
            members.append(member(path, data, mode=mode))
        for parent in parents:
            kinds[parent] = "directory"
        kinds[path] = kind
    return members


SEEDS = [
    tar(
        [
            member("a/b.py", b"x" * 700, mode=0o755),
            directory("d"),
            symlink("d/l", "../a/b.py"),
            hardlink("h", "a/b.py"),
        ],
        form,
    )
    for form in FORMATS.values()
] + [tar([member("n" * 150 + "/x", b"1"), member("caf\u00e9" * 30, b"2", pax_headers={"comment": "c" * 600})])]

EDIT = st.one_of(
    st.tuples(st.just("set"), st.integers(0, 1 << 16), st.integers(0, 255)),
    st.tuples(st.just("cut"), st.integers(0, 1 << 16), st.just(0)),
    st.tuples(st.just("drop"), st.integers(0, 1 << 16), st.integers(1, 1200)),
    st.tuples(st.just("repeat"), st.integers(0, 1 << 16), st.integers(1, 1200)),
    st.tuples(st.just("field"), st.integers(0, 40), st.integers(0, 9)),
)
FIELDS = [
    b"../../x\0",
    b"/abs\0",
    b"\xff" * 8,
    b"\x80" + b"\xff" * 11,
    b"9" * 12,
    b"77777777777\0",
    b"-1\0",
    b"\0" * 8,
    b"2",
    b"L",
]
PLACES = [0, 100, 124, 136, 156, 157, 257, 263, 345]


def mutated(seed: bytes, edits, *, fix_checksums: bool) -> bytes:
    data = bytearray(seed)
    for kind, position, amount in edits:
        at = position % max(len(data), 1)
        if kind == "set" and data:
            data[at] = amount
        elif kind == "cut":
            del data[at:]
        elif kind == "drop":
            del data[at : at + amount]
        elif kind == "repeat":
            data[at:at] = data[at : at + amount]
        elif kind == "field":
            header = (position * 512) % max(len(data) - 511, 1) // 512 * 512
            place = header + PLACES[amount % len(PLACES)]
            data[place : place + len(FIELDS[amount])] = FIELDS[amount]
    if fix_checksums:  # so that the mutation is seen by what lies behind the checksum
        for start in range(0, len(data) - 511, 512):
            block = data[start : start + 512]
            if block[257:262] == b"ustar":
                block[148:156] = b" " * 8
                data[start + 148 : start + 156] = b"%06o\0 " % sum(block)
    return bytes(data)
