"""PyTorch's own torch.testing._internal.distributed.distributed_test over the libnccl that is loaded: one part of its tests.

    torch_suite.py --part 0 --parts 8 [--only NAMES]    a line per test: passed, FAILED, skipped; exit status 1 if one failed
    torch_suite.py --list                               the names

scripts/nccl/torch_suite.sh runs all parts. Each test starts its ranks (WORLD_SIZE, default 2) as processes, so the class is
made here at the top level, where they find it.
"""

import argparse
import os
import sys
import time
import types
import unittest

os.environ.setdefault("BACKEND", "nccl")
os.environ.setdefault("WORLD_SIZE", "2")
# Seconds after which torch ends a test's processes; read when torch's module is imported.
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "90")

try:
    import expecttest  # noqa: F401
except ImportError:
    # torch.testing derives its TestCase from this package's, which wheels of torch do not require. It adds comparisons with
    # texts, which no test of distributed_test makes.
    sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase, ACCEPT=False)

import torch

# What test/distributed/test_distributed_spawn.py of torch does, too: results are compared with those of CPUs. Before
# torch.testing, which forbids to set such flags.
torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False

from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend


class Spawned(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()


class Lines(unittest.TestResult):
    def startTest(self, test):
        super().startTest(test)
        self.begin = time.monotonic()

    def line(self, kind, test, why=""):
        why = " ".join(why.split())[-400:]
        print(f"\n{kind} {test._testMethodName}{': ' + why if why else ''} ({time.monotonic() - self.begin:.1f} s)", flush=True)

    def addSuccess(self, test):
        self.line("passed", test)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.line("skipped", test, reason)

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.line("FAILED", test, str(error[1]))

    def addError(self, test, error):
        super().addError(test, error)
        # tearDown of a class has no method.
        if hasattr(test, "_testMethodName"):
            self.line("FAILED", test, f"{error[0].__name__}: {error[1]}")

    def addExpectedFailure(self, test, error):
        self.line("passed", test, "expected to fail")

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.line("FAILED", test, "expected to fail, but passed")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--only", default="", help="tests by name, comma-separated")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    names = unittest.TestLoader().getTestCaseNames(Spawned)
    if options.only:
        names = [name for name in options.only.split(",") if name in names]
    if options.list:
        print("\n".join(names))
        return
    result = Lines()
    for name in names[options.part :: options.parts]:
        print(f"\nbegin {name}", flush=True)
        unittest.TestSuite([Spawned(name)]).run(result)
    sys.exit(0 if result.wasSuccessful() else 1)


if __name__ == "__main__":
    main()
