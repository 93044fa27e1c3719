"""How a rank waits for a collective of Horovod's, patched: that function compiled, with a clock of the test's."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.unit.horovod_build.test_build import patches

pytestmark = pytest.mark.horovod  # where Horovod was built there is a compiler

AROUND = """
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

static long now_ns = 0, locks = 0, looks = 0, yields = 0, needed = 0;

namespace std { namespace chrono {
struct test_clock {  // each look at it takes a microsecond
  using duration = nanoseconds;
  static time_point<steady_clock> now() {
    now_ns += 1000;
    return time_point<steady_clock>(nanoseconds(now_ns));
  }
};
}  // namespace chrono
namespace this_thread {
inline void test_yield() { ++yields; now_ns += 1000; }
template <class D> void test_sleep(D length) {
  long ns = chrono::duration_cast<chrono::nanoseconds>(length).count();
  std::printf("[%ld, %ld],", now_ns, ns);
  now_ns += ns;
}
}}  // namespace std::this_thread

namespace py { struct gil_scoped_release { gil_scoped_release() { ++locks; } }; }
struct { bool PollHandle(int) { ++looks; return now_ns >= needed; }
         int* ReleaseHandle(int) { static int status; return &status; } } handle_manager;
void ThrowIfError(int) {}

#define steady_clock test_clock
#define yield test_yield
#define sleep_for test_sleep
@FUNCTION@
  auto status = handle_manager.ReleaseHandle(handle);
  ThrowIfError(*status);
}

int main(int, char** arguments) {
  needed = std::stol(arguments[1]);
  std::printf("{\\"sleeps\\": [");
  WaitAndClear(1);
  std::printf("null], \\"locks\\": %ld, \\"looks\\": %ld, \\"yields\\": %ld}", locks, looks, yields);
}
"""


@pytest.fixture(scope="module")
def wait(tmp_path_factory):
    """What happens in a wait of so many nanoseconds."""
    place: Path = tmp_path_factory.mktemp("wait")
    (place / "wait.cc").write_text("#include <string>\n" + AROUND.replace("@FUNCTION@", patches.WAITING_ASLEEP))
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, "-std=c++17", "-o", place / "wait", place / "wait.cc"], check=True)

    def run(nanoseconds: int) -> dict[str, object]:
        done = subprocess.run([place / "wait", str(nanoseconds)], check=True, capture_output=True, text=True)
        found = json.loads(done.stdout)
        found["sleeps"] = [tuple(each) for each in found["sleeps"] if each]
        return found

    return run


def test_pythons_lock_is_let_go_once_however_long_the_wait(wait):
    found = wait(1_000_000_000)
    assert found["looks"] > 100
    assert found["locks"] == 1


def test_what_is_over_at_once_is_only_looked_at(wait):
    found = wait(0)
    assert (found["looks"], found["yields"], found["sleeps"]) == (1, 0, [])


def test_a_short_wait_never_sleeps(wait):
    found = wait(190_000)
    assert found["yields"] > 50
    assert found["sleeps"] == []


def test_a_long_one_sleeps_a_small_part_of_what_it_has_waited_and_a_millisecond_at_most(wait):
    sleeps = wait(1_000_000_000)["sleeps"]
    assert all(0 < length <= min(at / 32, 1_000_000) for at, length in sleeps)
    assert sleeps[-1][1] == 1_000_000
    slept = sum(length for _, length in sleeps)
    assert slept > 0.98 * 1_000_000_000, "and does nothing else"
