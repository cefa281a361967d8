"""The compiled core's index finds what a map finds; keys spread over its table, whichever bytes they differ in."""

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
# Adds, replaces and removes records of random keys, so that the table is half full and then grows; prints how often a
# look-up differs from a map. With 31 bits for a record, as in a pool of 2^30 blocks, a distance beyond 0 is kept as 1.
MAP = """
#include "types.h"
#define private public
#include "keys.h"
#include <cstdio>
int main() {
    std::mt19937 random(1);
    std::vector<kvplane::KeyRecord> records(1 << 12);
    kvplane::Index index(BLOCKS);
    index.bits_ = BITS;
    std::map<kvplane::Key, uint32_t> known;
    long wrong = 0;
    for (int round = 0; round < 200000; ++round) {
        kvplane::Key key;
        key.pair = 1 + random() % 3;
        key.digest.size = kvplane::kDigestBytes;
        key.digest.bytes[0] = static_cast<uint8_t>(random());
        key.digest.bytes[31] = static_cast<uint8_t>(random() % (round < 100000 ? 2 : 8));
        const auto found = known.find(key);
        wrong += index.Find(records, key) != (found == known.end() ? kvplane::kNoRecord : found->second);
        const uint32_t record = random() % records.size();
        if (found == known.end()) {
            if (records[record].key.pair) continue;
            records[record].key = key;
            wrong += index.FindOrAdd(records, record) != kvplane::kNoRecord;
            known.emplace(key, record);
        } else if (!records[record].key.pair && random() % 2) {
            records[record].key = key;
            wrong += index.FindOrAdd(records, record) != found->second;
            index.Replace(records, found->second, record);
            records[std::exchange(found->second, record)].key = {};
        } else {
            index.Remove(records, found->second);
            records[found->second].key = {};
            known.erase(found);
        }
    }
    std::printf("%ld %zu", wrong, index.count() - known.size());
}
"""


def output(tmp_path, folder, program, *flags):
    (tmp_path / "program.cpp").write_text(program)
    command = [COMPILER, "-std=c++20", "-O1", *flags, f"-I{folder}", "program.cpp", "-o", "program"]
    subprocess.run(command, check=True, cwd=tmp_path)
    done = subprocess.run([tmp_path / "program"], capture_output=True, check=True)
    return [int(count) for count in done.stdout.split()]


def places(tmp_path, folder):
    return output(tmp_path, folder, PROGRAM)


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(("blocks", "bits"), [(512, 31), (512, 28), (16, 13)])
def test_the_index_finds_what_a_map_finds(tmp_path, blocks, bits):
    assert output(tmp_path, FOLDER, MAP, f"-DBLOCKS={blocks}", f"-DBITS={bits}") == [0, 0]


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="there is no C++ compiler")
def test_a_distance_that_does_not_fit_is_not_taken_for_itself(tmp_path):
    for name in ("values.h", "types.h", "keys.h"):
        text = (FOLDER / name).read_text()
        (tmp_path / name).write_text(text.replace("kept < Longest() ? kept :", "kept <= Longest() ? kept :"))
    try:
        found = output(tmp_path, tmp_path, MAP, "-DBLOCKS=512", "-DBITS=31")
    except subprocess.CalledProcessError:  # a key is not in the index
        return
    assert found != [0, 0]


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="there is no C++ compiler")
def test_keys_that_differ_in_one_byte_spread_over_the_index(tmp_path):
    counts = places(tmp_path, FOLDER)
    assert len(counts) == 32
    assert min(counts) > 240  # of 256 in 65,536 places


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="there is no C++ compiler")
def test_a_byte_that_is_not_mixed_is_caught(tmp_path):
    """The number of the pair once took the place of the last byte."""
    for name in ("values.h", "types.h", "keys.h"):
        text = (FOLDER / name).read_text()
        (tmp_path / name).write_text(text.replace("word[3] ^ secrets_[3]", "(word[3] << 8 | 1) ^ secrets_[3]"))
    counts = places(tmp_path, tmp_path)
    assert counts[31] == 1
    assert min(counts[:31]) > 240
