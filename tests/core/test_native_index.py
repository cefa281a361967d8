"""Keys of the compiled core's index spread over its table, whichever of their bytes they differ in."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

import native_build

COMPILER = os.environ.get("CXX") or "g++"
FOLDER = (native_build.ROOT / native_build.CORE.root / native_build.CORE.source).parent
# Prints, for each byte of a hash, the number of places of 256 keys that differ in this byte alone.
PROGRAM = """
#include "types.h"
#define private public
#include "keys.h"
#include <cstdio>
int main() {
    const kvplane::Index index(1 << 15);
    for (size_t at = 0; at < kvplane::kDigestBytes; ++at) {
        std::set<size_t> places;
        for (int value = 0; value < 256; ++value) {
            kvplane::Key key;
            key.pair = 1;
            key.digest.size = kvplane::kDigestBytes;
            key.digest.bytes.fill(7);
            key.digest.bytes[at] = static_cast<uint8_t>(value);
            places.insert(index.Place(key));
        }
        std::printf("%zu ", places.size());
    }
}
"""


def places(tmp_path, folder):
    (tmp_path / "places.cpp").write_text(PROGRAM)
    command = [COMPILER, "-std=c++20", f"-I{folder}", str(tmp_path / "places.cpp"), "-o", str(tmp_path / "places")]
    subprocess.run(command, check=True)
    return [
        int(count) for count in subprocess.run([tmp_path / "places"], capture_output=True, check=True).stdout.split()
    ]


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="there is no C++ compiler")
def test_keys_that_differ_in_one_byte_spread_over_the_index(tmp_path):
    counts = places(tmp_path, FOLDER)
    assert len(counts) == 32
    assert min(counts) > 240  # of 256 in 65,536 places


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="there is no C++ compiler")
def test_a_byte_that_is_not_mixed_is_caught(tmp_path):
    """The number of the pair once took the place of the last byte."""
    for name in ("types.h", "keys.h"):
        text = (FOLDER / name).read_text()
        (tmp_path / name).write_text(text.replace("word[3] ^ secrets_[3]", "(word[3] << 8 | 1) ^ secrets_[3]"))
    counts = places(tmp_path, tmp_path)
    assert counts[31] == 1
    assert min(counts[:31]) > 240
